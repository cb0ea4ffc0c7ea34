#include <clattn/block_pool.hpp>

#include "arrays.hpp"

namespace clattn::python {

void bind_block_pool(nb::module_& module) {
  using P = BlockPool;
  nb::class_<P>(module, "BlockPool",
                "Hands out a cache's blocks by reference count and finds those that hold the\n"
                "beginning of a sequence. For one thread at a time.")
      .def(nb::init<std::int32_t, std::int32_t>(), "num_blocks"_a, "block_size"_a)
      .def_prop_ro_static("MAX_BLOCKS", [](nb::handle) { return P::kMaxBlocks; })
      .def_prop_ro("num_blocks", &P::num_blocks)
      .def_prop_ro("block_size", &P::block_size)
      .def_prop_ro("num_free", &P::num_free)
      .def_prop_ro("num_used", &P::num_used)
      .def_prop_ro("peak_used", &P::peak_used)
      .def("reference_count", &P::reference_count, "block"_a)
      .def("is_published", &P::is_published, "block"_a)
      .def("content_of", &P::content_of, "block"_a,
           "The number of its published content, the same for equal content; 0 = none.")
      .def("allocate", &P::allocate, "count"_a,
           "Ids of free blocks, each with one holder now. Raises OutOfBlocks.")
      .def(
          "find_prefix",
          [](const P& self, nb::handle token_ids, std::uint64_t cache_salt) {
            return self.find_prefix(list_of<std::int32_t>(token_ids, "token_ids"), cache_salt);
          },
          "token_ids"_a, "cache_salt"_a = 0,
          "The blocks that were published with the longest beginning; share() holds them.")
      .def(
          "share",
          [](P& self, nb::handle blocks) { self.share(list_of<std::int32_t>(blocks, "blocks")); },
          "blocks"_a, "Adds a holder to each block.")
      .def(
          "publish",
          [](P& self, nb::handle token_ids, nb::handle blocks, std::uint64_t cache_salt) {
            self.publish(list_of<std::int32_t>(token_ids, "token_ids"),
                         list_of<std::int32_t>(blocks, "blocks"), cache_salt);
          },
          "token_ids"_a, "blocks"_a, "cache_salt"_a = 0,
          "Lets find_prefix() find the full blocks of a sequence.")
      .def(
          "release",
          [](P& self, nb::handle blocks) { self.release(list_of<std::int32_t>(blocks, "blocks")); },
          "blocks"_a, "Removes a holder from each block.");
  module.def(
      "hash_block",
      [](std::uint64_t parent, nb::handle token_ids) {
        return hash_block(parent, list_of<std::int32_t>(token_ids, "token_ids"));
      },
      "parent"_a, "token_ids"_a, "XXH3 of a full block's tokens and of what comes before.");
}

}  // namespace clattn::python
