#include "support/counting_new.hpp"

#include <cstdlib>
#include <new>

// In a file of its own: a compiler that sees both these and their callers takes the pair of malloc
// and free apart and warns.

namespace {

thread_local std::size_t counter = 0;
thread_local std::size_t failing = 0;  // 1: the next allocation

/// Counts an allocation; whether it is to be made.
bool next() {
  ++counter;
  return failing == 0 || --failing > 0;
}

void* allocate(std::size_t size) {
  if (!next()) return nullptr;
  return std::malloc(size == 0 ? 1 : size);
}

void* allocate(std::size_t size, std::align_val_t alignment) {
  if (!next()) return nullptr;
  const auto unit = static_cast<std::size_t>(alignment);
  return std::aligned_alloc(unit, (size + unit) / unit * unit);
}

void* there(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

std::size_t test::num_allocations() {
  return counter;
}

bool test::FailingAllocation::has_failed() {
  return failing == 0;
}

test::FailingAllocation::FailingAllocation(std::size_t number) {
  failing = number;
}

test::FailingAllocation::~FailingAllocation() {
  failing = 0;
}

void* operator new(std::size_t size) {
  return there(allocate(size));
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  return there(allocate(size, alignment));
}
// The standard's defaults call the two above, a sanitizer's do not: then delete would free what
// malloc never gave.
void* operator new(std::size_t size, const std::nothrow_t& /*no_throw*/) noexcept {
  return allocate(size);
}
void* operator new(std::size_t size, std::align_val_t alignment,
                   const std::nothrow_t& /*no_throw*/) noexcept {
  return allocate(size, alignment);
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
