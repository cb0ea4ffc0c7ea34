#pragma once

#include <gtest/gtest.h>

#include <clattn/clattn.hpp>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "device/attention_case.hpp"
#include "support/error_text.hpp"

/// What the tests of the cache operations share.
namespace cache_ops_test {

using attention_test::all_contexts;
using test::error_text;

inline oracle::Element element(clattn::DType dtype) {
  return static_cast<oracle::Element>(static_cast<int>(dtype));  // same order
}

template <typename T>
clattn::Buffer upload(const clattn::Context& context, const clattn::Queue& queue,
                      const std::vector<T>& values) {
  clattn::Buffer buffer = context.allocate(values.size() * sizeof(T));
  queue.write(buffer, std::as_bytes(std::span(values)));
  return buffer;
}

template <typename T>
std::vector<T> download(const clattn::Queue& queue, const clattn::Buffer& buffer) {
  std::vector<T> values(buffer.size_bytes() / sizeof(T));
  queue.read(buffer, std::as_writable_bytes(std::span(values)));
  return values;
}

inline std::vector<std::uint8_t> random_bytes(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::uint8_t> bytes(count);
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
  return bytes;
}

inline std::vector<std::byte> encode(clattn::DType dtype, const std::vector<double>& values) {
  const std::size_t width = clattn::element_size_bytes(dtype);
  std::vector<std::byte> bytes(values.size() * width);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint32_t bits = oracle::encode(element(dtype), values[i]);
    std::memcpy(bytes.data() + i * width, &bits, width);
  }
  return bytes;
}

inline std::vector<double> decode(clattn::DType dtype, const std::vector<std::byte>& bytes) {
  const std::size_t width = clattn::element_size_bytes(dtype);
  std::vector<double> values(bytes.size() / width);
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, bytes.data() + i * width, width);
    values[i] = oracle::decode(element(dtype), bits);
  }
  return values;
}

}  // namespace cache_ops_test
