/* C = A B, 32 x 64 by 64 x 32 of small whole numbers, in bf16 and in int8, in each way that
   tile/cpu/amx.clh has; all but the first time added. The host knows what C must be
   (src/opencl/device/self_test.cpp). */
#include "tile/cpu/amx.clh"

/* 16 numbers from -8 on; A is matrix[32][64], B matrix[64][32] from column 64 on. */
#define CLA_ELEMENT(row, column) \
  ((int)((((uint)(row)*128u + (uint)(column) + seed) * 2654435761u >> 20) % 16u) - 8)
#define CLA_BF16(number) ((ushort)(as_uint((float)(number)) >> 16))

#define CLA_STEP (16 * 32) /* elements of a tile of B */

/* C += A B by narrow tiles of `few` columns, */
static inline void cla_add_columns(const ushort* a, const ushort* b, int few, float* c) {
  for (int row = 0; row < 32; row += 16)
    for (int column = 0; column < 32; column += few) {
      float* sums = c + (column / 16 * 32 + row) * 16 + column % 16;
      CLA_LOAD_TILE(0, sums, 64);
      for (int step = 0; step < 2; ++step) {
        CLA_LOAD_TILE(2, a + row * 64 + step * 32, 128);
        CLA_LOAD_TILE(4, b + (column / 16 * 2 + step) * CLA_STEP + column % 16 * 2, 64);
        CLA_MULTIPLY_TILES(0, 2, 4);
      }
      CLA_STORE_TILE(0, sums, 64);
    }
}

/* of `few` rows, */
static inline void cla_add_rows(const ushort* a, const ushort* b, int few, float* c) {
  for (int row = 0; row < 32; row += few)
    for (int side = 0; side < 2; ++side) {
      float* sums = c + (side * 32 + row) * 16;
      CLA_LOAD_TILE(6, sums, 64);
      for (int step = 0; step < 2; ++step) {
        CLA_LOAD_TILE(5, a + row * 64 + step * 32, 128);
        CLA_LOAD_TILE(3, b + (side * 2 + step) * CLA_STEP, 64);
        CLA_MULTIPLY_TILES(6, 5, 3);
      }
      CLA_STORE_TILE(6, sums, 64);
    }
}

/* and of `few` columns of int8. */
static inline void cla_add_bytes(const char* a, int few, uint seed, float* c) {
  for (int column = 0; column < 32; column += few) {
    char b[64 * 16] __attribute__((aligned(64))); /* [four rows][column][4] */
    for (int i = 0; i < 64; ++i)
      for (int j = 0; j < few; ++j)
        b[(i / 4 * few + j) * 4 + i % 4] = (char)CLA_ELEMENT(i, 64 + column + j);
    for (int row = 0; row < 32; row += 16) {
      int sums[16 * 16] __attribute__((aligned(64)));
      CLA_ZERO_TILE(0);
      CLA_LOAD_TILE(2, a + row * 64, 64);
      CLA_LOAD_TILE(4, b, 4 * few);
      CLA_MULTIPLY_BYTES(0, 2, 4);
      CLA_STORE_TILE(0, sums, 4 * few);
      for (int i = 0; i < 16; ++i)
        for (int j = 0; j < few; ++j)
          c[(column / 16 * 32 + row + i) * 16 + column % 16 + j] += (float)sums[i * few + j];
    }
  }
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void clattn_selftest_amx(
    __global uint* restrict result, /* [32, 32]  bits of C in f32 */
    uint seed) {
  ushort a[32 * 64] __attribute__((aligned(64)));
  char bytes[32 * 64] __attribute__((aligned(64))); /* the same */
  /* [columns / 16][step][pair of rows][16][2] and [columns / 16][row][16] */
  ushort b[2 * 2 * CLA_STEP] __attribute__((aligned(64)));
  float c[2 * 32 * 16] __attribute__((aligned(64)));
  for (int row = 0; row < 32; ++row)
    for (int i = 0; i < 64; ++i) {
      a[row * 64 + i] = CLA_BF16(CLA_ELEMENT(row, i));
      bytes[row * 64 + i] = (char)CLA_ELEMENT(row, i);
    }
  for (int i = 0; i < 64; ++i)
    for (int column = 0; column < 32; ++column)
      b[(column / 16 * 32 + i / 2) * 32 + column % 16 * 2 + i % 2] =
          CLA_BF16(CLA_ELEMENT(i, 64 + column));
  cla_open_tiles();
  cla_multiply_block(a, 128, b, 4 * CLA_STEP, c, 2048, 32, 2, 0);
  for (int few = 4; few <= 16; few *= 2) {
    cla_open_narrow_tiles(few);
    cla_add_columns(a, b, few, c);
    cla_add_rows(a, b, few, c);
    cla_add_bytes(bytes, few, seed, c);
  }
  cla_close_tiles();
  for (int row = 0; row < 32; ++row)
    for (int column = 0; column < 32; ++column)
      result[row * 32 + column] = as_uint(c[(column / 16 * 32 + row) * 16 + column % 16]);
}
