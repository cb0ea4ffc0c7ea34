// Norm, rotary embedding and write of queries, keys and values (prepare_qkv.hpp).

#include "prepare_qkv.hpp"

#include <set>

#include "caches.hpp"

namespace clattn::python {

namespace {

/// The keywords of a call, each asked for once: what is left over is refused.
class Keywords {
 public:
  explicit Keywords(const nb::kwargs& given) : given_(given) {}

  /// None where it is not given.
  nb::object take(const char* name) {
    known_.insert(name);
    return given_.contains(name) ? nb::object(given_[name]) : nb::none();
  }
  template <typename T>
  T take(const char* name, T otherwise) {
    const nb::object value = take(name);
    if (value.is_none()) return otherwise;
    T taken = otherwise;
    if (!nb::try_cast(value, taken))
      throw_invalid("prepare_qkv: " + std::string(name) + ": of type " +
                    nb::type_name(value.type()).c_str() + ", legal: a number or bool");
    return taken;
  }
  DType dtype(const char* name, DType otherwise) {
    const nb::object value = take(name);
    return value.is_none() ? otherwise : parse_dtype(name_of(value));
  }
  void refuse_others() const {
    std::string legal;
    for (const std::string& name : known_) legal += (legal.empty() ? "" : ", ") + name;
    for (const auto& [key, value] : given_) {
      const auto name = nb::cast<std::string>(key);
      if (!known_.contains(name))
        throw_invalid("prepare_qkv: unknown keyword " + name + ", legal: " + legal);
    }
  }

 private:
  const nb::kwargs& given_;
  std::set<std::string> known_;
};

void take_norm(CallTensors& tensors, Keywords& given, PrepareQKV& call) {
  HeadNorm norm;
  const nb::object eps = given.take("eps");
  const nb::object q_weight = given.take("q_weight"), k_weight = given.take("k_weight");
  norm.weight_dtype = given.dtype("weight_dtype", call.dtype);
  norm.weight_plus_one = given.take("weight_plus_one", false);
  norm.rounds = given.take("rounds_norm", true);
  if (eps.is_none()) {
    if (!q_weight.is_none() || !k_weight.is_none() || norm.weight_plus_one || !norm.rounds)
      throw_invalid(
          "prepare_qkv: eps: None, but q_weight, k_weight, weight_plus_one or rounds_norm are "
          "given, legal: none of them without a norm");
    return;
  }
  norm.eps = nb::cast<float>(eps);
  norm.q_weight = whole(tensors, q_weight, norm.weight_dtype, 1, "q_weight");
  norm.k_weight = whole(tensors, k_weight, norm.weight_dtype, 1, "k_weight");
  call.norm = norm;
}

/// Three rows of an array, or one; a Buffer as it is.
void take_positions(CallTensors& tensors, Keywords& given, bool sections, PrepareQKV& call) {
  const nb::object positions = given.take("positions");
  call.position_bits = given.take("position_bits", std::int32_t{64});
  call.positions_stride = given.take("positions_stride", std::int64_t{0});
  if (positions.is_none()) return;
  if (!sections || nb::isinstance<Buffer>(positions)) {
    call.positions = call.position_bits == 32
                         ? tensors.values<std::int32_t>(positions, "positions")
                         : tensors.values<std::int64_t>(positions, "positions");
    return;
  }
  const auto rows = numbers<std::int64_t, 2>(positions, "positions");
  if (rows.shape(0) != 3)
    throw_invalid("positions: " + std::to_string(rows.shape(0)) +
                  " rows, legal with mrope_section: 3 (time, height, width)");
  if (call.positions_stride != 0 || call.position_bits != 64)
    throw_invalid(
        "positions: an array, but positions_stride or position_bits is given, legal: with a "
        "Buffer");
  call.positions = tensors.array_values(HostArray(rows), "positions");
  call.positions_stride = static_cast<std::int64_t>(rows.shape(1));
}

void take_rope(CallTensors& tensors, Keywords& given, PrepareQKV& call) {
  RotaryEmbedding rope;
  const RotaryEmbedding plain;
  const nb::object table = given.take("cos_sin_cache");
  rope.dtype = given.dtype("cos_sin_dtype", plain.dtype);
  rope.rotary_dim = given.take("rotary_dim", plain.rotary_dim);
  rope.is_neox = given.take("is_neox", plain.is_neox);
  rope.rotates_tail = given.take("rotates_tail", plain.rotates_tail);
  rope.mrope_section = given.take("mrope_section", plain.mrope_section);
  rope.mrope_interleaved = given.take("mrope_interleaved", plain.mrope_interleaved);
  const bool sections = rope.mrope_section != plain.mrope_section;
  take_positions(tensors, given, sections, call);
  if (table.is_none()) {
    if (rope.rotary_dim != 0 || !rope.is_neox || rope.rotates_tail || sections ||
        rope.mrope_interleaved)
      throw_invalid(
          "prepare_qkv: cos_sin_cache: None, but rotary_dim, is_neox, rotates_tail, mrope_section "
          "or mrope_interleaved are given, legal: none of them without a rotation");
    return;
  }
  const std::int64_t width = rope.rotary_dim == 0 ? call.head_size : rope.rotary_dim;
  rope.cos_sin_cache = whole(tensors, table, rope.dtype, width, "cos_sin_cache");
  call.rope = rope;
}

/// An output that may be the very object of its input.
void take_rows(CallTensors& tensors, const PrepareQKV& call, Keywords& given, const char* name,
               std::int64_t width, TensorRef& input, TensorRef& output) {
  const nb::object from = given.take(name);
  const std::string out_name = std::string(name) + "_out";
  const nb::object to = given.take(out_name.c_str());
  output = tensors.output(to, call.dtype, width, out_name.c_str());
  input = to.is(from) ? output : tensors.input(from, call.dtype, width, name);
}

constexpr const char* kDoc =
    "Norm, rotary embedding and write of queries, keys and values in one launch. Keywords:\n"
    "num_tokens: rows of each tensor.\n"
    "num_heads: of queries; num_kv_heads: of keys and values; head_size: elements; dtype: of "
    "tensors.\n"
    "query: rows, or None; query_out: where they go, which may be query itself.\n"
    "key: rows, or None; key_out: where they go, which may be key itself, or None.\n"
    "value: rows, with a cache.\n"
    "gate_out: where gates go; query then holds query and gate of each head in turn.\n"
    "eps: of an RMSNorm of heads; None: no norm.\n"
    "q_weight: of its weights, or None; k_weight: the same of keys; weight_dtype: None is dtype.\n"
    "weight_plus_one: weights are 1 + these; rounds_norm: to dtype before the rotation.\n"
    "cos_sin_cache: [positions, rotary_dim], cosines, then sines; None: no rotation.\n"
    "cos_sin_dtype: of it, f32; rotary_dim: rotated elements of a head, 0 is all.\n"
    "is_neox: how elements pair up; rotates_tail: a head's last ones are rotated.\n"
    "mrope_section: angles of time, height and width; mrope_interleaved: they take turns.\n"
    "positions: [tokens] or [3, tokens]; of a Buffer position_bits: 64 or 32, and\n"
    "positions_stride: elements from row to row.\n"
    "errors: DeviceErrors that note positions outside of cos_sin_cache.\n"
    "cache: where keys and values are stored at slot_mapping: one slot a token.\n"
    "num_slots: tokens from this one on have none.";

}  // namespace

PrepareQKV prepare_of(CallTensors& tensors, const nb::kwargs& kwargs,
                      const AttentionConfig* sizes) {
  Keywords given(kwargs);
  PrepareQKV call;
  if (sizes == nullptr) {
    call.num_tokens = given.take("num_tokens", std::int64_t{0});
    call.num_heads = given.take("num_heads", call.num_heads);
    call.num_kv_heads = given.take("num_kv_heads", call.num_kv_heads);
    call.head_size = given.take("head_size", call.head_size);
    call.dtype = given.dtype("dtype", call.dtype);
    const nb::object cache = given.take("cache"), slots = given.take("slot_mapping");
    call.num_slots = given.take("num_slots", call.num_slots);
    if (!cache.is_none()) call.cache = nb::cast<const KVCache&>(cache);
    call.slot_mapping = tensors.values<std::int64_t>(slots, "slot_mapping").handle();
  } else {
    call.num_heads = sizes->num_heads;
    call.num_kv_heads = sizes->num_kv_heads;
    call.head_size = sizes->head_size;
    call.dtype = sizes->dtype;
  }
  const std::int64_t queries = std::int64_t{call.num_heads} * call.head_size;
  const std::int64_t keys = std::int64_t{call.num_kv_heads} * call.head_size;
  const nb::object gate = given.take("gate_out");
  call.gate_out = tensors.output(gate, call.dtype, queries, "gate_out");
  if (gate.is_none()) {
    take_rows(tensors, call, given, "query", queries, call.query, call.query_out);
  } else {
    call.query = tensors.input(given.take("query"), call.dtype, 2 * queries, "query");
    call.query_out = tensors.output(given.take("query_out"), call.dtype, queries, "query_out");
  }
  take_rows(tensors, call, given, "key", keys, call.key, call.key_out);
  call.value = tensors.input(given.take("value"), call.dtype, keys, "value");
  take_norm(tensors, given, call);
  take_rope(tensors, given, call);
  const nb::object errors = given.take("errors");
  if (!errors.is_none()) call.errors = &nb::cast<Errors&>(errors).errors;
  given.refuse_others();
  return call;
}

void bind_prepare_qkv(nb::module_& module) {
  module.def(
      "prepare_qkv",
      [](const Context& context, const Queue& queue, const nb::kwargs& kwargs) {
        CallTensors tensors(context, queue);
        const PrepareQKV call = prepare_of(tensors, kwargs);
        return tensors.run([&](Event* event) { prepare_qkv(context, queue, call, event); });
      },
      "context"_a, "queue"_a, "kwargs"_a, kDoc);
}

}  // namespace clattn::python
