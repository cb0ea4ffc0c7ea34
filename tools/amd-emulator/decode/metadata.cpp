#include "decode/metadata.hpp"

#include <stdexcept>

namespace amdemu {
namespace {

struct Node {
  std::string text;
  std::int64_t number = 0;
  std::vector<Node> items;  // of a list, or values of a map
  std::vector<std::string> keys;

  const Node* get(std::string_view key) const {
    for (std::size_t n = 0; n < keys.size(); ++n) {
      if (keys[n] == key) return &items[n];
    }
    return nullptr;
  }
  std::uint32_t value(std::string_view key, std::uint32_t otherwise = 0) const {
    const Node* node = get(key);
    return node == nullptr ? otherwise : static_cast<std::uint32_t>(node->number);
  }
  bool flag(std::string_view key) const { return value(key) != 0; }
  std::string string(std::string_view key) const {
    const Node* node = get(key);
    return node == nullptr ? std::string() : node->text;
  }
};

class Reader {
 public:
  explicit Reader(std::span<const unsigned char> bytes) : left_(bytes) {}

  Node read() {
    Node node;
    const auto tag = static_cast<unsigned>(big_endian(1));
    if (tag < 0x80)
      node.number = tag;
    else if (tag < 0x90)
      read_map(node, tag & 15);
    else if (tag < 0xa0)
      read_list(node, tag & 15);
    else if (tag < 0xc0)
      read_text(node, tag & 31);
    else if (tag == 0xc2 || tag == 0xc3)
      node.number = tag & 1;
    else if (tag >= 0xcc && tag <= 0xcf)
      node.number = signed_value(1U << (tag - 0xcc), false);
    else if (tag >= 0xd0 && tag <= 0xd3)
      node.number = signed_value(1U << (tag - 0xd0), true);
    else if (tag >= 0xd9 && tag <= 0xdb)
      read_text(node, big_endian(1U << (tag - 0xd9)));
    else if (tag == 0xdc || tag == 0xdd)
      read_list(node, big_endian(tag == 0xdc ? 2 : 4));
    else if (tag == 0xde || tag == 0xdf)
      read_map(node, big_endian(tag == 0xde ? 2 : 4));
    else if (tag >= 0xe0)
      node.number = static_cast<std::int8_t>(tag);
    return node;
  }

 private:
  std::span<const unsigned char> take(std::size_t size) {
    if (size > left_.size()) throw std::runtime_error("metadata of the code object ends early");
    const auto taken = left_.first(size);
    left_ = left_.subspan(size);
    return taken;
  }
  std::uint64_t big_endian(std::size_t size) {
    std::uint64_t value = 0;
    for (const unsigned char byte : take(size)) value = value << 8 | byte;
    return value;
  }
  std::int64_t signed_value(std::size_t size, bool is_signed) {
    const std::uint64_t value = big_endian(size);
    const unsigned unused = 64 - 8 * static_cast<unsigned>(size);
    return is_signed ? static_cast<std::int64_t>(value << unused) >> unused
                     : static_cast<std::int64_t>(value);
  }
  void read_text(Node& node, std::size_t size) {
    const auto bytes = take(size);
    node.text.assign(bytes.begin(), bytes.end());
  }
  void read_list(Node& node, std::size_t size) {
    for (std::size_t n = 0; n < size; ++n) node.items.push_back(read());
  }
  void read_map(Node& node, std::size_t size) {
    for (std::size_t n = 0; n < size; ++n) {
      node.keys.push_back(read().text);
      node.items.push_back(read());
    }
  }

  std::span<const unsigned char> left_;
};

KernelArg argument_of(const Node& node) {
  KernelArg arg;
  arg.kind = node.string(".value_kind");
  arg.name = node.string(".name");
  arg.type_name = node.string(".type_name");
  arg.address_space = node.string(".address_space");
  arg.offset = node.value(".offset");
  arg.size = node.value(".size");
  arg.is_const = node.flag(".is_const");
  arg.is_restrict = node.flag(".is_restrict");
  arg.is_volatile = node.flag(".is_volatile");
  return arg;
}

Kernel kernel_of(const Node& node) {
  Kernel kernel;
  kernel.name = node.string(".name");
  kernel.local_bytes = node.value(".group_segment_fixed_size");
  kernel.private_bytes = node.value(".private_segment_fixed_size");
  kernel.kernarg_bytes = node.value(".kernarg_segment_size");
  kernel.max_group = node.value(".max_flat_workgroup_size", 256);
  kernel.dynamic_stack = node.flag(".uses_dynamic_stack");
  if (const Node* group = node.get(".reqd_workgroup_size")) {
    for (std::size_t n = 0; n < 3; ++n)
      kernel.reqd_group[n] = static_cast<std::uint32_t>(group->items.at(n).number);
  }
  if (const Node* args = node.get(".args")) {
    for (const Node& arg : args->items) kernel.args.push_back(argument_of(arg));
  }
  return kernel;
}

}  // namespace

std::vector<Kernel> read_kernels(std::span<const unsigned char> note) {
  std::vector<Kernel> kernels;
  const Node root = Reader(note).read();
  if (const Node* list = root.get("amdhsa.kernels")) {
    for (const Node& node : list->items) kernels.push_back(kernel_of(node));
  }
  return kernels;
}

}  // namespace amdemu
