// Matrix products of every shape that kernels/mfma.cl and wmma.cl hold, against sums in double.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>

#include "gpu.hpp"

namespace {

enum class Format { kF16, kBF16, kF32, kF64, kI8, kI32, kFp8, kBf8 };

std::size_t bytes_of(Format f) {
  switch (f) {
    case Format::kF64:
      return 8;
    case Format::kF32:
    case Format::kI32:
      return 4;
    case Format::kF16:
    case Format::kBF16:
      return 2;
    default:
      return 1;
  }
}

/// 8-bit floats. FNUZ (gfx942): a bias higher by one, no infinities, no -0 (0x80 is NaN).
double small_float(std::uint8_t code, bool is_bf8, bool fnuz) {
  const int bits = is_bf8 ? 2 : 3, bias = (is_bf8 ? 15 : 7) + (fnuz ? 1 : 0);
  const int exponent = (code & 0x7f) >> bits, mantissa = code & ((1 << bits) - 1);
  const bool has_infinities = !fnuz && is_bf8;
  if (fnuz ? code == 0x80 : has_infinities ? exponent == 31 : (code & 0x7f) == 0x7f) return NAN;
  const double value = exponent == 0 ? std::ldexp(mantissa, 1 - bias - bits)
                                     : std::ldexp(mantissa + (1 << bits), exponent - bias - bits);
  return (code & 0x80) != 0 ? -value : value;
}

template <class T>
T at(const unsigned char* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(T));
  return value;
}
double value_of(const unsigned char* bytes, Format f, bool fnuz) {
  switch (f) {
    case Format::kF64:
      return at<double>(bytes);
    case Format::kF32:
      return static_cast<double>(at<float>(bytes));
    case Format::kF16:
      return static_cast<double>(at<_Float16>(bytes));
    case Format::kBF16:
      return static_cast<double>(std::bit_cast<float>(cl_uint{at<cl_ushort>(bytes)} << 16));
    case Format::kI8:
      return at<signed char>(bytes);
    case Format::kI32:
      return at<cl_int>(bytes);
    case Format::kFp8:
    case Format::kBf8:
      return small_float(*bytes, f == Format::kBf8, fnuz);
  }
  return NAN;
}

/// A matrix as the device reads it, and what its elements are.
struct Matrix {
  std::vector<unsigned char> bytes;
  std::vector<double> values;

  Matrix(std::size_t count, Format f, bool fnuz, std::mt19937& random)
      : bytes(count * bytes_of(f)), values(count) {
    std::normal_distribution<double> normal;
    for (std::size_t n = 0; n < count; ++n) {
      unsigned char* to = &bytes[n * bytes_of(f)];
      do write(to, f, normal(random), static_cast<std::uint32_t>(random()));
      while (std::isnan(value_of(to, f, fnuz)));
      values[n] = value_of(to, f, fnuz);
    }
  }

 private:
  /// Floats of 16 bits and more from a normal distribution, of the others every code.
  static void write(unsigned char* to, Format f, double normal, std::uint32_t code) {
    const auto single = static_cast<float>(normal);
    const auto half = static_cast<_Float16>(normal);
    const auto upper = static_cast<cl_ushort>(std::bit_cast<cl_uint>(single) >> 16);
    switch (f) {
      case Format::kF64:
        std::memcpy(to, &normal, sizeof(normal));
        break;
      case Format::kF32:
        std::memcpy(to, &single, sizeof(single));
        break;
      case Format::kF16:
        std::memcpy(to, &half, sizeof(half));
        break;
      case Format::kBF16:
        std::memcpy(to, &upper, sizeof(upper));
        break;
      default:
        *to = static_cast<unsigned char>(code);
    }
  }
};

struct Product {
  std::string kernel;
  int size, k_step;  // size x size results, k in a step
  Format a, b, d;
};

/// Of sums of n products, as a part of the sum of their magnitudes.
double tolerance(Format d, int n) {
  if (d == Format::kI32) return 0;
  return n * (d == Format::kF64 ? 0x1p-53 : 0x1p-24);
}

std::vector<Product> products_of(const std::string& chip) {
  using enum Format;
  if (chip == "gfx1100" || chip == "gfx1201") {
    std::vector<Product> products = {{"f16_16x16x16", 16, 16, kF16, kF16, kF32},
                                     {"bf16_16x16x16", 16, 16, kBF16, kBF16, kF32},
                                     {"i8_16x16x16", 16, 16, kI8, kI8, kI32}};
    if (chip == "gfx1201") {
      products.push_back({"fp8_fp8_16x16x16", 16, 16, kFp8, kFp8, kF32});
      products.push_back({"bf8_bf8_16x16x16", 16, 16, kBf8, kBf8, kF32});
    }
    return products;
  }
  std::vector<Product> products = {
      {"f16_32x32x8", 32, 8, kF16, kF16, kF32},    {"f16_16x16x16", 16, 16, kF16, kF16, kF32},
      {"bf16_32x32x8", 32, 8, kBF16, kBF16, kF32}, {"bf16_16x16x16", 16, 16, kBF16, kBF16, kF32},
      {"f32_32x32x2", 32, 2, kF32, kF32, kF32},    {"f32_16x16x4", 16, 4, kF32, kF32, kF32},
      {"f64_16x16x4", 16, 4, kF64, kF64, kF64}};
  if (chip == "gfx90a") {
    products.push_back({"i8_16x16x16", 16, 16, kI8, kI8, kI32});
    return products;
  }
  products.push_back({"i8_16x16x32", 16, 32, kI8, kI8, kI32});
  for (const Format a : {kFp8, kBf8})
    for (const Format b : {kFp8, kBf8}) {
      const std::string types =
          std::string(a == kFp8 ? "fp8_" : "bf8_") + (b == kFp8 ? "fp8_" : "bf8_");
      products.push_back({types + "32x32x16", 32, 16, a, b, kF32});
      products.push_back({types + "16x16x32", 16, 32, a, b, kF32});
    }
  if (chip != "gfx950") return products;
  products.push_back({"f16_32x32x16", 32, 16, kF16, kF16, kF32});
  products.push_back({"bf16_32x32x16", 32, 16, kBF16, kBF16, kF32});
  products.push_back({"f16_16x16x32", 16, 32, kF16, kF16, kF32});
  products.push_back({"bf16_16x16x32", 16, 32, kBF16, kBF16, kF32});
  return products;
}

}  // namespace

class MatrixProducts : public Gpu {
 protected:
  /// `blocks` products of [size, k] and [k, size], one behind the other.
  void expect_product(const Product& p, int blocks, int k, const std::vector<double>& a,
                      const std::vector<double>& b, const std::vector<unsigned char>& d) {
    for (int block = 0; block < blocks; ++block)
      for (int row = 0; row < p.size; ++row)
        for (int column = 0; column < p.size; ++column) {
          double sum = 0, magnitudes = 0;
          for (int n = 0; n < k; ++n) {
            const double term =
                a[index(block, p.size, row, k, n)] * b[index(block, k, n, p.size, column)];
            sum += term, magnitudes += std::abs(term);
          }
          const std::size_t at = index(block, p.size, row, p.size, column);
          const double got = value_of(&d[at * bytes_of(p.d)], p.d, false);
          ASSERT_LE(std::abs(got - sum), tolerance(p.d, k) * magnitudes)
              << p.kernel << ", block " << block << ", row " << row << ", column " << column << ": "
              << got << " for " << sum;
        }
  }

 private:
  static std::size_t index(int block, int rows, int row, int columns, int column) {
    return static_cast<std::size_t>((block * rows + row) * columns + column);
  }
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(MatrixProducts);
INSTANTIATE_TEST_SUITE_P(
    Chips, MatrixProducts,
    testing::ValuesIn(chips_of({"gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"})), chip_name);

TEST_P(MatrixProducts, OfEveryShape) {
  const bool fnuz = chip() == "gfx942";
  std::mt19937 random(7);
  for (const Product& p : products_of(chip())) {
    const cl_int steps = 5;
    const int k = steps * p.k_step;
    const Matrix a(static_cast<std::size_t>(p.size * k), p.a, fnuz, random);
    const Matrix b(static_cast<std::size_t>(p.size * k), p.b, fnuz, random);
    const std::size_t size = static_cast<std::size_t>(p.size * p.size) * bytes_of(p.d);
    const cl_mem d = buffer(std::vector<unsigned char>(size, 0xff));  // NaN
    const char* file = wave() == 64 ? "mfma.cl" : "wmma.cl";
    ASSERT_EQ(
        launch(kernel(file, p.kernel), wave(), wave(), buffer(a.bytes), buffer(b.bytes), d, steps),
        CL_SUCCESS)
        << p.kernel;
    expect_product(p, 1, k, a.values, b.values, read<unsigned char>(d, size));
  }
}

class MatrixBlocks : public MatrixProducts {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(MatrixBlocks);
INSTANTIATE_TEST_SUITE_P(Chips, MatrixBlocks,
                         testing::ValuesIn(chips_of({"gfx90a", "gfx942", "gfx950"})), chip_name);

TEST_P(MatrixBlocks, OfMfma) {
  std::mt19937 random(9);
  const Product rows[] = {{"blocks_4x4x4", 4, 4, Format::kF16, Format::kF16, Format::kF32},
                          {"blocks_f64_4x4x4", 4, 4, Format::kF64, Format::kF64, Format::kF64}};
  for (const Product& p : rows) {
    const int blocks = p.d == Format::kF64 ? 4 : 16;
    const auto count = static_cast<std::size_t>(blocks * 16);
    const Matrix a(count, p.a, false, random), b(count, p.b, false, random);
    const cl_mem d = buffer(std::vector<unsigned char>(count * bytes_of(p.d), 0xff));
    ASSERT_EQ(launch(kernel("mfma.cl", p.kernel), 64, 64, buffer(a.bytes), buffer(b.bytes), d),
              CL_SUCCESS);
    expect_product(p, blocks, 4, a.values, b.values, read<unsigned char>(d, count * bytes_of(p.d)));
  }
}

namespace {
std::vector<cl_uint> words() {
  std::vector<cl_uint> words(256);
  for (std::size_t n = 0; n < words.size(); ++n) words[n] = static_cast<cl_uint>(n * 2654435761U);
  return words;
}
}  // namespace

class LocalLoads : public Gpu {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LocalLoads);
INSTANTIATE_TEST_SUITE_P(Chips, LocalLoads, testing::ValuesIn(chips_of({"gfx942", "gfx950"})),
                         chip_name);

TEST_P(LocalLoads, WriteALaneBehindTheOther) {
  const std::vector<cl_uint> a = words();
  const cl_mem out = buffer(std::vector<cl_uint>(320));
  ASSERT_EQ(launch(kernel("local_loads.cl", "to_local"), 64, 64, buffer(a), out), CL_SUCCESS);
  const auto got = read<cl_uint>(out, 320);
  for (unsigned l = 0; l < 64; ++l) {
    const auto extended = static_cast<cl_uint>(cl_int{static_cast<signed char>(a[l])});
    EXPECT_EQ(got[l * 5], a[l * 3]) << "dword, lane " << l;
    EXPECT_EQ(got[l * 5 + 1], a[l + 64]) << "dword with a scalar base, lane " << l;
    EXPECT_EQ(got[l * 5 + 2], a[l] & 0xffffU) << "ushort, lane " << l;
    EXPECT_EQ(got[l * 5 + 3], extended) << "sbyte, lane " << l;
    EXPECT_EQ(got[l * 5 + 4], l % 3 == 0 ? a[l] & 0xffU : 5555U) << "ubyte, lane " << l;
  }
}

class Gfx950 : public Gpu {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Gfx950);
INSTANTIATE_TEST_SUITE_P(Chips, Gfx950, testing::ValuesIn(chips_of({"gfx950"})), chip_name);

TEST_P(Gfx950, WideLoadsSwapsAndTransposes) {
  const std::vector<cl_uint> a = words();
  const cl_mem out = buffer(std::vector<cl_uint>(576));
  ASSERT_EQ(launch(kernel("local_loads.cl", "gfx950"), 64, 64, buffer(a), out), CL_SUCCESS);
  const auto got = read<cl_uint>(out, 576);
  for (unsigned l = 0; l < 64; ++l) {
    EXPECT_EQ(got[l], a[255 - l]) << "dwordx4, lane " << l;
    EXPECT_EQ(got[64 + l], a[8 + l]) << "dwordx3, lane " << l;  // the offset counts on both sides
    const auto swapped = [l](unsigned row) {                    // of (lane, lane + 100)
      return (l & row) != 0 ? (l - row + 100) << 16 | (l + 100) : l << 16 | (l + row);
    };
    EXPECT_EQ(got[128 + l], swapped(32)) << "permlane32_swap, lane " << l;
    EXPECT_EQ(got[192 + l], swapped(16)) << "permlane16_swap, lane " << l;
    for (unsigned e = 0; e < 4; ++e)
      EXPECT_EQ(got[256 + l * 4 + e], l / 16 * 64 + e * 16 + l % 16) << "read_tr, lane " << l;
    EXPECT_EQ(got[512 + l], (l & 0xf0fU) ^ (a[l] | ~a[l + 1])) << "bitop3, lane " << l;
  }
}
