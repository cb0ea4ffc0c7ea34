#include <clattn/clattn.h>
#include <clattn/clattn_graph.h>
#include <clattn/clattn_session.h>

#include <cstddef>

// A field that a later version adds at a struct's end has to lie behind what an older program says
// its size is, so no struct ends in padding.
template <typename Field>
struct Alone {
  Field field;
};
template <typename Struct, typename Field>
constexpr std::size_t size_of(Field Struct::*) {
  return sizeof(Alone<Field>);
}
#define CLATTN_ENDS_WITH(Struct, field)                                              \
  static_assert(offsetof(Struct, field) + size_of(&Struct::field) == sizeof(Struct), \
                #Struct " ends in padding: name it reserved")

CLATTN_ENDS_WITH(ClattnDeviceId, device);
CLATTN_ENDS_WITH(ClattnContextInfo, max_alloc_bytes);
CLATTN_ENDS_WITH(ClattnLayerConfig, fp8_products);
CLATTN_ENDS_WITH(ClattnKVScales, prob_scale);
CLATTN_ENDS_WITH(ClattnCacheInfo, key_dim_stride);
CLATTN_ENDS_WITH(ClattnCacheWrite, event);
CLATTN_ENDS_WITH(ClattnStepOptions, side_by_side);
CLATTN_ENDS_WITH(ClattnBatchInfo, common_prefix_len);
CLATTN_ENDS_WITH(ClattnStepInfo, max_seq_len);
CLATTN_ENDS_WITH(ClattnTensors, event);
CLATTN_ENDS_WITH(ClattnSessionConfig, progress_user);
CLATTN_ENDS_WITH(ClattnSessionInfo, reserved);
CLATTN_ENDS_WITH(ClattnRequestInfo, block_table);
CLATTN_ENDS_WITH(ClattnStepRequest, reserved);
CLATTN_ENDS_WITH(ClattnStepRows, seq_lens);
CLATTN_ENDS_WITH(ClattnGraphInfo, num_launches);
