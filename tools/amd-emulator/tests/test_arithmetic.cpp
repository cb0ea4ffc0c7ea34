// Saturation, fractions, denormals, conversions to 8 bits (kernels/arithmetic.cl).
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "gpu.hpp"

class Arithmetic : public Gpu {};
INSTANTIATE_TEST_SUITE_P(Chips, Arithmetic, testing::ValuesIn(all_chips()), chip_name);

namespace {

template <class T>
cl_int held(std::int64_t value) {
  using Limits = std::numeric_limits<T>;
  return static_cast<cl_int>(
      static_cast<T>(std::clamp<std::int64_t>(value, Limits::min(), Limits::max())));
}
/// Both halves of two words.
template <class T, class F>
cl_int halves(cl_int a, cl_int b, F f) {
  const auto of = [](cl_int word, int n) {
    return std::int64_t{static_cast<T>(static_cast<cl_uint>(word) >> (16 * n))};
  };
  const auto half = [&](int n) {
    return static_cast<cl_uint>(static_cast<std::uint16_t>(held<T>(f(of(a, n), of(b, n)))));
  };
  return static_cast<cl_int>(half(0) | half(1) << 16);
}

}  // namespace

TEST_P(Arithmetic, Saturates) {
  const std::vector<cl_int> edges = {0,
                                     1,
                                     -1,
                                     70000,
                                     0x7fff,
                                     -0x8000,
                                     0x7fff7fff,
                                     std::numeric_limits<cl_int>::max(),
                                     std::numeric_limits<cl_int>::min()};
  std::vector<cl_int> as, bs;
  for (const cl_int a : edges)
    for (const cl_int b : edges) as.push_back(a), bs.push_back(b);
  const cl_mem out = buffer(std::vector<cl_int>(as.size() * 9));
  ASSERT_EQ(
      launch(kernel("arithmetic.cl", "saturating"), as.size(), 1, buffer(as), buffer(bs), out),
      CL_SUCCESS);
  const auto got = read<cl_int>(out, as.size() * 9);
  const auto sum = [](std::int64_t a, std::int64_t b) { return a + b; };
  const auto difference = [](std::int64_t a, std::int64_t b) { return a - b; };
  for (std::size_t n = 0; n < as.size(); ++n) {
    const std::int64_t a = as[n], b = bs[n], ua = static_cast<cl_uint>(as[n]),
                       ub = static_cast<cl_uint>(bs[n]);
    const auto a16 = static_cast<std::int16_t>(a), b16 = static_cast<std::int16_t>(b);
    const std::array<cl_int, 9> expected = {
        held<cl_int>(a + b),
        held<cl_int>(a - b),
        held<cl_uint>(ua + ub),
        held<cl_uint>(ua - ub),
        halves<std::int16_t>(as[n], bs[n], sum),
        halves<std::uint16_t>(as[n], bs[n], difference),
        held<std::int16_t>(a16 + b16),
        held<std::uint16_t>(static_cast<std::uint16_t>(a) - static_cast<std::uint16_t>(b)),
        held<cl_uint>(ua - ub)};
    for (std::size_t k = 0; k < expected.size(); ++k)
      EXPECT_EQ(got[n * 9 + k], expected[k]) << a << ", " << b << ": operation " << k;
  }
}

TEST_P(Arithmetic, FractionsStayBelowOne) {
  const std::vector<double> a = {0.25, -0.25, 3.0, -1e-20};
  const cl_mem out = buffer(std::vector<double>(a.size()));
  ASSERT_EQ(launch(kernel("arithmetic.cl", "fractions"), a.size(), 1, buffer(a), out), CL_SUCCESS);
  EXPECT_EQ(read<double>(out, a.size()),
            (std::vector<double>{0.25, 0.75, 0.0, std::nextafter(1.0, 0.0)}));
}

TEST_P(Arithmetic, DenormalsAreOfEachWave) {
  constexpr std::size_t kItems = 128;
  const float smallest = std::numeric_limits<float>::min();
  const cl_mem out = buffer(std::vector<float>(kItems));
  ASSERT_EQ(launch(kernel("arithmetic.cl", "denormals"), kItems, kItems,
                   buffer(std::vector<float>(kItems, smallest)), out),
            CL_SUCCESS);
  const auto got = read<float>(out, kItems);
  for (unsigned n = 0; n < kItems; ++n)
    EXPECT_EQ(got[n], n < wave() ? 0.0F : smallest / 2) << "item " << n;
}

class SmallFloats : public Gpu {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(SmallFloats);
INSTANTIATE_TEST_SUITE_P(Chips, SmallFloats,
                         testing::ValuesIn(chips_of({"gfx942", "gfx950", "gfx1201"})), chip_name);

TEST_P(SmallFloats, OverflowAsTheModeSays) {
  struct Row {
    float value;
    cl_uint plain, clamped;  // fp8 in bits 0-7, bf8 in bits 8-15
  };
  const float inf = std::numeric_limits<float>::infinity();
  // FNUZ: NaN is 0x80, the largest are 240 and 57344. OCP: NaN is 0x7f, the largest 448 and 57344.
  const std::vector<Row> fnuz = {{1.0F, 0x4040, 0x4040},     {240.0F, 0x607f, 0x607f},
                                 {-1000.0F, 0xe880, 0xe8ff}, {1e6F, 0x8080, 0x7f7f},
                                 {-inf, 0x8080, 0x8080},     {-0.0F, 0x0000, 0x0000}};
  const std::vector<Row> ocp = {{1.0F, 0x3c38, 0x3c38},     {448.0F, 0x5f7e, 0x5f7e},
                                {-1000.0F, 0xe4ff, 0xe4fe}, {1e6F, 0x7c7f, 0x7b7e},
                                {-inf, 0xfcff, 0xfcff},     {-0.0F, 0x8080, 0x8080}};
  const auto& rows = chip() == "gfx942" ? fnuz : ocp;
  std::vector<float> a;
  for (const Row& row : rows) a.push_back(row.value);
  const cl_mem out = buffer(std::vector<cl_uint>(a.size() * 2));
  ASSERT_EQ(launch(kernel("arithmetic.cl", "small_floats"), a.size(), 1, buffer(a), out),
            CL_SUCCESS);
  const auto got = read<cl_uint>(out, a.size() * 2);
  for (std::size_t n = 0; n < rows.size(); ++n) {
    EXPECT_EQ(got[n * 2], rows[n].plain) << rows[n].value;
    EXPECT_EQ(got[n * 2 + 1], rows[n].clamped) << rows[n].value << " with FP16_OVFL";
  }
}
