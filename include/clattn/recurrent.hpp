#pragma once

#include <clattn/opencl.hpp>

#include <clattn/attention_config.hpp>
#include <clattn/context.hpp>
#include <clattn/kv_cache.hpp>
#include <clattn/kv_cache_spec.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace CLATTN_API clattn {

/// The requests of one step of recurrent layers, on the host.
struct RecurrentBatch {
  std::span<const std::int32_t> query_start_loc = {};  ///< [num_reqs + 1], prefix sums from 0 on
  /// [num_reqs, state_columns]: pages of states. A request has its state in the page of column 0; a
  /// negative number, or null_block_id, there means that the request has none: its results are 0.
  /// Requests with drafts use all columns.
  std::span<const std::int32_t> state_indices = {};
  std::int32_t state_columns = 1;  ///< 1 + the most drafts of a request
  /// [num_reqs]: whether the request continues its state. A fresh one never reads its page. Empty:
  /// all continue.
  std::span<const std::uint8_t> has_initial_state = {};
  /// [num_reqs], vLLM's: how many tokens of the request's last step were accepted, its bonus token
  /// included, 1 … state_columns. The request then reads the state of column accepted - 1 and
  /// stores the state after its token i, of at most state_columns, to column i, if there is a page.
  /// Its convolution begins at row accepted - 1 of the page of column 0. Negative: the request has
  /// no drafts and uses column 0. Empty: none has.
  std::span<const std::int32_t> num_accepted_tokens = {};
  std::int32_t null_block_id =
      -1;  ///< a page that stands for none; negative: there is no such page
};

/// A list on the device.
struct DeviceList {
  Buffer buffer = {};       ///< empty: there is no list
  std::int64_t offset = 0;  ///< elements in front of it
};

/// The same step on the device, which all recurrent layers of a model share. An engine may fill it
/// in itself. Whatever lists on the device hold, kernels stay within tensors and pages: a request
/// whose page or accepted tokens are illegal gives results of 0 and changes no page.
struct RecurrentMetadata {
  DeviceList query_start_loc = {};      ///< i32 [num_reqs + 1]
  DeviceList state_indices = {};        ///< i32 [num_reqs, state_columns]
  DeviceList has_initial_state = {};    ///< u8 [num_reqs]; none: all continue
  DeviceList num_accepted_tokens = {};  ///< i32 [num_reqs]; none: no request has drafts
  std::int32_t num_reqs = 0;            ///< requests
  std::int32_t state_columns = 1;       ///< columns of state_indices
  std::int32_t null_block_id = -1;      ///< RecurrentBatch::null_block_id
  std::int64_t num_tokens = 0;          ///< at least the last of query_start_loc; rows of tensors
  /// The most tokens of a request without drafts, or an upper bound.
  std::int64_t max_query_len = std::numeric_limits<std::int32_t>::max();
  std::int32_t max_state_index = -1;  ///< largest page that is named, for errors; negative: unknown
};

/// Checks the lists of a step and brings them to the device. Not thread-safe.
class RecurrentMetadataBuilder {
 public:
  /// Takes its memory at the first build().
  explicit RecurrentMetadataBuilder(const Context& context);
  ~RecurrentMetadataBuilder();
  RecurrentMetadataBuilder(RecurrentMetadataBuilder&&) noexcept;
  RecurrentMetadataBuilder& operator=(RecurrentMetadataBuilder&&) noexcept;

  /// Asynchronous: `batch` is read before the call returns. The result's memory is the builder's:
  /// it holds for what the queue, which must be in-order, is given until the next build(). Throws
  /// kInvalidArgument for lists of wrong lengths, starts that fall, accepted tokens outside
  /// 1 … state_columns or of a request without an initial state, more tokens of a request with
  /// drafts than it has columns, and a page that two requests, or two tokens of one, would write or
  /// that one writes and another one reads.
  RecurrentMetadata build(cl_command_queue queue, const RecurrentBatch& batch);

 private:
  struct Memory;
  std::unique_ptr<Memory> memory_;
};

// Shapes of states. Tensors of a token are rows [heads, elements] without gaps; TensorRef says how
// far rows are apart, so that they may be slices of a fused projection. Activations are f32, f16 or
// bf16, states f32, f16 or bf16, arithmetic f32. All calls are asynchronous and throw
// kInvalidArgument, naming the field, its value and what is legal, for sizes, types and tensors
// that do not fit. Rows of tensors behind the last request stay as they are. Outputs overlap no
// input.

/// What a page holds of a gated delta net's layer, convolution first (vLLM:
/// gated_delta_net_state_shape): [conv_width - 1 + num_spec, 2 K heads' elements + V heads'] of
/// `conv_dtype`, [num_v_heads, head_v_dim, head_k_dim] of `state_dtype`.
std::vector<StateTensor> gated_delta_net_state_shape(
    std::int32_t num_k_heads, std::int32_t num_v_heads, std::int32_t head_k_dim,
    std::int32_t head_v_dim, std::int32_t conv_width, std::int32_t num_spec, DType conv_dtype,
    DType state_dtype = DType::kF32);
/// Of a Mamba 2 layer (vLLM: mamba2_state_shape): [conv_width - 1 + num_spec, heads' elements +
/// 2 n_groups state_size], [num_heads, head_dim, state_size].
std::vector<StateTensor> mamba2_state_shape(std::int32_t num_heads, std::int32_t head_dim,
                                            std::int32_t n_groups, std::int32_t state_size,
                                            std::int32_t conv_width, std::int32_t num_spec,
                                            DType conv_dtype, DType state_dtype = DType::kF32);
/// Of a short convolution (vLLM: short_conv_state_shape): [conv_width - 1, channels].
std::vector<StateTensor> short_conv_state_shape(std::int32_t channels, std::int32_t conv_width,
                                                DType conv_dtype);

/// What follows a convolution, or multiplies in a gated norm.
enum class RecurrentActivation : std::uint8_t { kNone, kSilu, kSigmoid };
/// "none", "silu" or "sigmoid".
std::string_view to_string(RecurrentActivation activation);
/// Inverse of to_string, which also takes "swish" for silu; throws kInvalidArgument naming the
/// legal values.
RecurrentActivation parse_recurrent_activation(std::string_view name);

/// A convolution of each channel by itself over the tokens of a request.
struct CausalConv1d {
  TensorRef x = {};                   ///< [num_tokens, channels] of `dtype`
  TensorRef out = {};                 ///< the same shape
  Buffer weight = {};                 ///< [channels, width] of `weight_dtype`
  Buffer bias = {};                   ///< [channels] of `weight_dtype`; none = 0
  std::int32_t channels = 0;          ///< a multiple of 16
  std::int32_t width = 4;             ///< 2 … 8
  DType dtype = DType::kBF16;         ///< of x and out, and of states
  DType weight_dtype = DType::kBF16;  ///< f32, f16 or bf16
  RecurrentActivation activation = RecurrentActivation::kSilu;  ///< kNone or kSilu
};

/// y_t = act(bias + sum_j weight[j] x_{t - width + 1 + j}). Before a request's first token come
/// rows 0 … width - 2 of its page, oldest first, or 0 of a fresh request; afterwards they are the
/// last inputs. `states`: [rows, channels] of the activations' type, rows >= width - 1. A request
/// with drafts takes rows accepted - 1 … accepted + width - 3, and the page then holds that window
/// and its tokens but for the oldest row, for which it must have room. The first name is vLLM's for
/// prompts and mixed steps, the second for steps of decodes: here they are one.
///@{
void causal_conv1d_fn(const Context& context, cl_command_queue queue, const CausalConv1d& conv,
                      const StateView& states, const RecurrentMetadata& metadata,
                      Event* event = nullptr);
void causal_conv1d_update(const Context& context, cl_command_queue queue, const CausalConv1d& conv,
                          const StateView& states, const RecurrentMetadata& metadata,
                          Event* event = nullptr);
///@}
/// The short convolution of LFM2: out = out_gate * conv(in_gate * x), gates like x. The products
/// in_gate * x are rounded to the activations' type, which pages hold.
void short_conv(const Context& context, cl_command_queue queue, const CausalConv1d& conv,
                TensorRef in_gate, TensorRef out_gate, const StateView& states,
                const RecurrentMetadata& metadata, Event* event = nullptr);

/// How a state takes a token: S k is what it predicts of the value, and the error of that is added,
/// or the value itself is.
enum class RecurrentRule : std::uint8_t { kDelta, kAdditive };
/// "delta" or "additive".
std::string_view to_string(RecurrentRule rule);
/// Inverse of to_string; throws kInvalidArgument naming the legal values.
RecurrentRule parse_recurrent_rule(std::string_view name);

/// Tensors and options of the gated delta rule. Gates are either g (and beta) or a (and b) with
/// A_log: whichever of g and a has a buffer.
struct GatedDeltaRule {
  TensorRef query = {};  ///< [num_tokens, num_k_heads, head_k_dim] of `dtype`
  TensorRef key = {};    ///< the same shape
  TensorRef value = {};  ///< [num_tokens, num_v_heads, head_v_dim] of `dtype`
  TensorRef out = {};    ///< as value
  /// [num_tokens, num_v_heads] of `gate_dtype`, with decay_by_channel [num_tokens, num_v_heads,
  /// head_k_dim]: the natural logarithm of the decay, <= 0.
  TensorRef g = {};
  TensorRef beta = {};  ///< [num_tokens, num_v_heads] of `gate_dtype`; none with kAdditive
  TensorRef a = {};     ///< as g: g = -exp(A_log) softplus(a + dt_bias)
  TensorRef b = {};     ///< as beta: beta = sigmoid(b)
  Buffer A_log = {};    ///< f32 [num_v_heads], with a
  Buffer dt_bias = {};  ///< f32, one for each number of a token in a; none = 0
  /// With a: g = bound * sigmoid(exp(A_log) (a + dt_bias)) instead, bound < 0.
  std::optional<float> gate_lower_bound = std::nullopt;
  std::int32_t num_k_heads = 1;    ///< heads of query and key
  std::int32_t num_v_heads = 1;    ///< a multiple; head h is on key head h / (num_v / num_k)
  std::int32_t head_k_dim = 128;   ///< a multiple of 16, at most 256
  std::int32_t head_v_dim = 128;   ///< the same
  DType dtype = DType::kBF16;      ///< of query, key, value and out
  DType gate_dtype = DType::kF32;  ///< of g and beta, or a and b: f32, f16 or bf16
  bool decay_by_channel = false;   ///< each element of a key decays by itself (KDA)
  RecurrentRule rule = RecurrentRule::kDelta;  ///< what a token adds to its state
  bool use_qk_l2norm_in_kernel = true;         ///< x / sqrt(sum x^2 + 1e-6), of queries and keys
  std::optional<float> scale = std::nullopt;   ///< of queries; none = head_k_dim^-1/2
  /// Which matrix units may multiply chunks. kGpu and kCpu: none, so that all products are in f32.
  KernelFamily kernel_family = KernelFamily::kAuto;
};

/// For each token and value head, of its state S [head_v_dim, head_k_dim]:
///   S = S e^g;  d = beta (v - S k), additive: d = v;  S = S + d k^T;  o = scale S q.
/// `states`: [num_v_heads, head_v_dim, head_k_dim], f32, f16 or bf16; rounded where stored.
///
/// fused_recurrent goes token by token, and gives a request the same bits in any batch, and with
/// f32 states however its tokens are split over steps. chunk takes requests of at least 16 tokens
/// without drafts in chunks, where the device's local memory holds one, and others as
/// fused_recurrent does. Both compute in f32, except that products of chunks round states, and what
/// is added to them, to `dtype` if rounds_products() says so. The context then keeps memory for
/// each of the last queues, and each recording for itself: 7 KB for 32 tokens and a value head, up
/// to 256 MiB or what one head needs, beyond which heads take turns. Both throw kUnsupported if the
/// device has nothing of `kernel_family`.
///@{
void fused_recurrent_gated_delta_rule(const Context& context, cl_command_queue queue,
                                      const GatedDeltaRule& rule, const StateView& states,
                                      const RecurrentMetadata& metadata, Event* event = nullptr);
void chunk_gated_delta_rule(const Context& context, cl_command_queue queue,
                            const GatedDeltaRule& rule, const StateView& states,
                            const RecurrentMetadata& metadata, Event* event = nullptr);
///@}
/// Whether chunks are multiplied by matrix units, which take 16-bit operands. They need the delta
/// rule, one decay for each head, activations in bf16, and rows of query and key that begin at
/// multiples of 16 bytes. Builds the kernel for f32 states.
bool rounds_products(const Context& context, const GatedDeltaRule& rule);

/// Mamba 2: S = S e^(A dt) + dt x B^T;  y = S C + D x, then y silu(z). dt is softplus(dt + dt_bias)
/// or dt + dt_bias, within dt_limit. Head h is in group h / (num_heads / n_groups).
struct SelectiveStateUpdate {
  TensorRef x = {};               ///< [num_tokens, num_heads, head_dim] of `dtype`
  TensorRef dt = {};              ///< [num_tokens, num_heads] of `dtype`
  TensorRef B = {};               ///< [num_tokens, n_groups, state_size] of `dtype`
  TensorRef C = {};               ///< as B
  TensorRef z = {};               ///< as x; none: no gate
  TensorRef out = {};             ///< as x
  Buffer A = {};                  ///< f32 [num_heads], < 0
  Buffer D = {};                  ///< f32 [num_heads]; none = 0
  Buffer dt_bias = {};            ///< f32 [num_heads]; none = 0
  std::int32_t num_heads = 1;     ///< heads of x
  std::int32_t n_groups = 1;      ///< divides num_heads
  std::int32_t head_dim = 64;     ///< a multiple of 16, at most 256
  std::int32_t state_size = 128;  ///< the same
  DType dtype = DType::kBF16;     ///< of all tensors but A, D and dt_bias
  bool dt_softplus = true;        ///< whether dt passes softplus
  float dt_min = 0;               ///< time_step_limit
  float dt_max = std::numeric_limits<float>::infinity();  ///< >= dt_min
};

/// `states`: [num_heads, head_dim, state_size]. The first goes token by token, the second takes
/// prompts in chunks, both as the calls of the gated delta rule do.
///@{
void selective_state_update(const Context& context, cl_command_queue queue,
                            const SelectiveStateUpdate& update, const StateView& states,
                            const RecurrentMetadata& metadata, Event* event = nullptr);
void mamba_chunk_scan_combined(const Context& context, cl_command_queue queue,
                               const SelectiveStateUpdate& update, const StateView& states,
                               const RecurrentMetadata& metadata, Event* event = nullptr);
///@}

/// Lightning attention: S = S e^-slope + v k^T; o = scale S q.
struct LightningAttention {
  TensorRef query = {};          ///< [num_tokens, num_heads, head_size] of `dtype`
  TensorRef key = {};            ///< the same shape
  TensorRef value = {};          ///< the same shape
  TensorRef out = {};            ///< the same shape
  Buffer log_decay = {};         ///< f32 [num_heads]: -slope
  std::int32_t num_heads = 1;    ///< heads
  std::int32_t head_size = 128;  ///< a multiple of 16, at most 256
  DType dtype = DType::kBF16;    ///< of all tensors
  float scale = 1;               ///< of queries
};
/// `states`: [num_heads, head_size of values, head_size of keys] (vLLM has them transposed). Takes
/// prompts in chunks, as chunk_gated_delta_rule() does.
void lightning_attention(const Context& context, cl_command_queue queue,
                         const LightningAttention& attention, const StateView& states,
                         const RecurrentMetadata& metadata, Event* event = nullptr);

/// norm(x) = x / sqrt(mean x^2 + eps) over `width` elements.
struct RmsNormGated {
  TensorRef x = {};                   ///< [num_tokens, num_heads, width] of `dtype`
  TensorRef z = {};                   ///< the same shape; none: no gate
  TensorRef out = {};                 ///< the same shape
  Buffer weight = {};                 ///< [width] of `weight_dtype`
  std::int64_t num_tokens = 0;        ///< rows of the tensors
  std::int32_t num_heads = 1;         ///< rows of a token, or its groups
  std::int32_t width = 128;           ///< a multiple of 8
  float eps = 1e-6F;                  ///< >= 0
  DType dtype = DType::kBF16;         ///< of x, z and out
  DType weight_dtype = DType::kBF16;  ///< f32, f16 or bf16
  RecurrentActivation activation = RecurrentActivation::kSilu;  ///< of z: kSilu or kSigmoid
  bool norm_before_gate = true;  ///< norm(x) weight act(z); else norm(x act(z)) weight
};
/// `out` may be x itself.
void rms_norm_gated(const Context& context, cl_command_queue queue, const RmsNormGated& norm,
                    Event* event = nullptr);

/// Copies running states to other pages, as prefix caching of blocks wants it (vLLM's
/// get_conv_copy_spec and get_temporal_copy_spec in one launch). For each request r: of
/// `conv_states`, rows accepted - 1 … of the page of column 0 go to rows 0 … of page targets[r]; of
/// `states`, the page of column accepted - 1 goes to page targets[r]. Without accepted tokens it is
/// row 0 and column 0. A page may be its own target. A negative target copies nothing. Either view
/// may have no buffer. `targets`: i32 [num_reqs] on the device.
void mamba_copy_blocks(const Context& context, cl_command_queue queue, const StateView& conv_states,
                       const StateView& states, const RecurrentMetadata& metadata,
                       const DeviceList& targets, Event* event = nullptr);

}  // namespace clattn
