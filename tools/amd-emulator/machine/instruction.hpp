// A decoded instruction: its handler, its operands and what else the handler wants to know.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

namespace amdemu {

struct Wave;
struct Instruction;
using Handler = void (*)(Wave&, const Instruction&);

struct Operand {
  enum Kind : std::uint8_t { kNone, kVgpr, kSgpr, kImmediate, kOff };
  Kind kind = kNone;
  std::uint8_t dwords = 1;
  bool neg = false, abs = false, sext = false;
  bool is_float = false;    // immediate written as a decimal fraction
  bool is_literal = false;  // immediate written as hexadecimal: 32 bits of the encoding
  std::uint16_t reg = 0;
  std::uint32_t imm = 0;  // 32-bit pattern
  double value = 0;       // of is_float
};

/// Source 0 is read from other lanes (DPP).
struct DppControl {
  std::int16_t lane[64];          // where each lane reads; -1: outside
  std::uint64_t enabled = ~0ULL;  // lanes that row_mask and bank_mask leave on
  bool bound_zero = false, fetch_inactive = false;
};
/// Sources and destination are a byte (0-3), a half (4, 5) or all (6) of a register (SDWA).
struct SdwaControl {
  static constexpr int kAll = 6;
  enum Unused : std::uint8_t { kPad, kSignExtend, kPreserve } unused = kPad;
  int src[2] = {kAll, kAll};
  int dst = kAll;
};
/// What a matrix instruction multiplies. kWmma11 and kWmma12 differ in which lane holds what.
struct MatrixControl {
  enum Kind : std::uint8_t { kMfma, kWmma11, kWmma12 } kind = kMfma;
  enum Type : std::uint8_t { kF16, kBF16, kF32, kF64, kI8, kU8, kI4, kU4, kFp8, kBf8, kXf32, kI32 };
  Type a = kF16, b = kF16, d = kF32;
  int m = 16, n = 16, k = 16, blocks = 1, per_lane = 4;  // per_lane: elements of A or B
  bool flush = false, fnuz = false;
};
enum class AtomicOp : std::uint8_t {
  kSwap,
  kCompareSwap,
  kAdd,
  kSub,
  kSignedMin,
  kUnsignedMin,
  kSignedMax,
  kUnsignedMax,
  kAnd,
  kOr,
  kXor,
  kIncrement,
  kDecrement,
  kAddFloat,
  kMinFloat,
  kMaxFloat,
  kPackedAddF16,
  kPackedAddBF16,
};
/// How a memory instruction is read. The last row holds indices of `Instruction::src`, -1: none.
struct MemoryControl {
  enum Space : std::uint8_t { kGlobal, kFlat, kScratch, kBuffer, kLocal } space = kGlobal;
  AtomicOp op = AtomicOp::kSwap;
  std::uint8_t bytes = 4;    // of one element
  std::uint8_t count = 1;    // elements: 2 for read2 and write2
  std::uint16_t stride = 0;  // bytes that one step of their offsets means
  bool is_signed = false, high = false, d16 = false, returns = false;
  std::int8_t address = -1, data = -1, data1 = -1, base = -1, soffset = -1;
};
/// A part of a hardware register, of s_getreg and s_setreg.
struct HardwareRegister {
  enum Id : std::uint8_t { kOther, kMode, kHardwareId } id = kOther;
  std::uint8_t shift = 0, size = 32;
};

struct Instruction {
  Handler handler = nullptr;
  Handler inner = nullptr;  // what a DPP, SDWA or dual-issue handler calls
  std::uint64_t address = 0;
  std::uint32_t size = 4;
  std::uint8_t num_dst = 0, num_src = 0;
  Operand dst[2];
  Operand src[5];
  bool is_branch = false;
  std::int32_t target = -1;  // index of a branch's target in Image::code
  std::int32_t offset = 0, offset1 = 0;
  std::uint8_t op_sel = 0, op_sel_hi = 0xff, neg_lo = 0, neg_hi = 0;  // a bit a source
  std::uint8_t cbsz = 0, abid = 0, blgp = 0;                          // of MFMA
  std::uint8_t omod = 0;                                              // 1: * 2, 2: * 4, 3: / 2
  std::uint8_t byte_sel = 0, truth_table = 0;                         // of v_bitop3
  bool clamp = false, returns = false, offen = false, lds = false, has_op_sel = false;
  HardwareRegister hardware;
  std::shared_ptr<const DppControl> dpp;
  std::shared_ptr<const SdwaControl> sdwa;
  std::shared_ptr<const MatrixControl> matrix;
  std::shared_ptr<const MemoryControl> memory;
  std::shared_ptr<const Instruction> second;  // of a dual-issued pair
  std::string text;                           // as llvm-objdump writes it
};

}  // namespace amdemu
