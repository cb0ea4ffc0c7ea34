#include "support/counting_new.hpp"

#include <cstdlib>
#include <new>

// In a file of its own: a compiler that sees both these and their callers takes the pair of malloc
// and free apart and warns.

namespace {

thread_local std::size_t counter = 0;

void* counted(void* memory) {
  ++counter;
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

std::size_t test::num_allocations() {
  return counter;
}

void* operator new(std::size_t size) {
  return counted(std::malloc(size == 0 ? 1 : size));
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  const auto unit = static_cast<std::size_t>(alignment);
  return counted(std::aligned_alloc(unit, (size + unit) / unit * unit));
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}
