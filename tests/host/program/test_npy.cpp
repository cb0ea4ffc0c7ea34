#include <gtest/gtest.h>

#include <clattn/error.hpp>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "files/npy.hpp"
#include "program/common/npy_reader.hpp"

namespace {

using clattn::cli::num_elements;
using clattn::cli::parse_npy;
using clattn::cli::read_npy;
using clattn::npy::NpyArray;

/// A .npy image: magic, version, header length in `major`'s width, header, data.
std::string image(int major, std::string_view header, std::size_t data_bytes) {
  std::string text = "\x93NUMPY";
  text += static_cast<char>(major);
  text += '\0';
  const std::size_t width = major == 1 ? 2 : 4;
  for (std::size_t i = 0; i < width; ++i) text += static_cast<char>(header.size() >> (8 * i) & 255);
  return text + std::string(header) + std::string(data_bytes, '\x01');
}

NpyArray parse(const std::string& text) {
  return parse_npy(std::as_bytes(std::span(text)), "x.npy");
}

std::string header_of(std::string_view descr, std::string_view order, std::string_view shape) {
  return "{'descr': '" + std::string(descr) + "', 'fortran_order': " + std::string(order) +
         ", 'shape': " + std::string(shape) + ", }   \n";
}

TEST(Npy, ReadsEveryFormatVersion) {
  for (const int major : {1, 2, 3}) {
    const NpyArray array = parse(image(major, header_of("<f4", "False", "(2, 3)"), 24));
    EXPECT_EQ(array.descr, "<f4");
    EXPECT_EQ(array.shape, (std::vector<std::int64_t>{2, 3}));
    EXPECT_EQ(array.data.size(), 24U);
    EXPECT_EQ(num_elements(array), 6);
  }
}

TEST(Npy, ReadsScalarsEmptyArraysAndOneByteTypes) {
  EXPECT_EQ(num_elements(parse(image(1, header_of("<i8", "False", "()"), 8))), 1);
  EXPECT_EQ(num_elements(parse(image(1, header_of("<i4", "False", "(0, 7)"), 0))), 0);
  EXPECT_EQ(parse(image(1, header_of("<u1", "False", "(3,)"), 3)).descr, "|u1");
  EXPECT_EQ(parse(image(1, "{\"shape\":(1,),\"descr\":\"|i1\",\"fortran_order\":False}", 1)).descr,
            "|i1");
}

TEST(Npy, RoundTripsThroughAFile) {
  const auto path = std::filesystem::path(testing::TempDir()) / "clattn_round_trip.npy";
  for (const std::vector<std::int64_t>& shape :
       {std::vector<std::int64_t>{}, {1}, {2, 0}, {1, 1, 1}}) {
    NpyArray array{"<i4", shape, {}};
    array.data.resize(static_cast<std::size_t>(4 * num_elements(array)), std::byte{7});
    clattn::npy::write_npy(path, array);
    EXPECT_EQ(std::filesystem::file_size(path) % 64, array.data.size() % 64);
    const NpyArray back = read_npy(path);
    EXPECT_EQ(back.descr, array.descr);
    EXPECT_EQ(back.shape, array.shape);
    EXPECT_EQ(back.data, array.data);
  }
  std::filesystem::remove(path);
}

/// A sparse file of 1 TiB: refused by its first bytes, type or shape, never held in memory.
TEST(Npy, LooksAtTheHeaderBeforeItTakesMemory) {
  const auto path = std::filesystem::path(testing::TempDir()) / "clattn_sparse.npy";
  const auto error_of = [&](const std::string& start) {
    std::ofstream(path, std::ios::binary) << start;
    std::filesystem::resize_file(path, std::uintmax_t{1} << 40U);
    try {
      read_npy(path, [](const NpyArray& array) {
        EXPECT_TRUE(array.data.empty());
        throw clattn::Error(clattn::ErrorCode::kInvalidArgument, "not this one");
      });
    } catch (const clattn::Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_EQ(error_of("zeros"), "clattn_sparse.npy: not a .npy file");
  const std::string header = header_of("|u1", "False", "(7,)");
  EXPECT_NE(error_of(image(1, header, 0)).find("expected 7 for |u1 [7]"), std::string::npos);
  EXPECT_NE(error_of(std::string("\x93NUMPY\x02\0\xff\xff\xff\x0f{}", 14)).find("at most 65535"),
            std::string::npos);
  const std::string extent = std::to_string((std::uint64_t{1} << 40U) - 128);
  const std::string wide = "{'descr': '|u1', 'fortran_order': False, 'shape': (" + extent + ",)}";
  EXPECT_EQ(error_of(image(1, wide + std::string(128 - 10 - wide.size(), ' '), 0)), "not this one");
  std::filesystem::remove(path);
}

struct BadRow {
  std::string image;
  const char* says;
};

TEST(Npy, RefusesMalformedFilesWithTheReason) {
  const std::string good = header_of("<f4", "False", "(2,)");
  const BadRow rows[] = {
      {"", "not a .npy file"},
      {"PK\x03\x04zipped", "not a .npy file"},
      {"\x93NUMPY\x01", "truncated"},
      {image(4, good, 8), "version 4"},
      {image(0, good, 8), "version 0"},
      {image(1, good, 7), "7 bytes"},
      {image(1, good, 9), "9 bytes"},
      {image(1, good, 8).substr(0, 40), "truncated"},
      {std::string("\x93NUMPY\x02\0\xff\xff\xff\xff{}", 14), "truncated"},
      {image(1, header_of(">f4", "False", "(2,)"), 8), ">f4"},
      {image(1, header_of("<f8", "False", "(1,)"), 8), "<f8"},
      {image(1, header_of("|O", "False", "(1,)"), 8), "|O"},
      {image(1, header_of("<f4", "True", "(2,)"), 8), "Fortran"},
      {image(1, header_of("<f4", "Maybe", "(2,)"), 8), "fortran_order"},
      {image(1, header_of("<f4", "False", "(-2,)"), 8), "shape"},
      {image(1, header_of("<f4", "False", "(2 3)"), 8), "')' expected"},
      {image(1, header_of("<f4", "False", "(99999999999999999999,)"), 8), "shape"},
      {image(1, header_of("<f4", "False", "(4294967296, 4294967296, 4)"), 8), "overflows"},
      {image(1, header_of("<f4", "False", "(4611686018427387904,)"), 8), "overflows"},
      {image(1, header_of("<f4", "False", "(1000000000000,)"), 8), "expected 4000000000000"},
      {image(1, "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,)}", 8),
       "structured"},
      {image(1, "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", 8),
       "repeated"},
      {image(1, "{'descr': '<f4', 'shape': (2,)}", 8), "must name"},
      {image(1, "{'descr': '<f4", 8), "unfinished"},
      {image(1, good + "}", 8), "after the header"},
      {image(1, "", 8), "'{' expected"},
  };
  for (const BadRow& row : rows) {
    try {
      parse(row.image);
      ADD_FAILURE() << "accepted: " << row.says;
    } catch (const clattn::Error& error) {
      EXPECT_EQ(error.code(), clattn::ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find(row.says), std::string::npos) << error.what();
      EXPECT_EQ(std::string(error.what()).rfind("x.npy: ", 0), 0U) << error.what();
    }
  }
}

TEST(Npy, EveryTruncationIsRefused) {
  const std::string whole = image(1, header_of("<f4", "False", "(2, 3)"), 24);
  for (std::size_t length = 0; length < whole.size(); ++length) {
    EXPECT_THROW(parse(whole.substr(0, length)), clattn::Error) << length;
  }
}

TEST(Npy, MissingFilesAndDirectoriesAreIoErrors) {
  for (const char* path : {"/nonexistent/x.npy", "/"}) {
    try {
      read_npy(path);
      ADD_FAILURE() << path;
    } catch (const clattn::Error& error) {
      EXPECT_EQ(error.code(), clattn::ErrorCode::kIo);
    }
  }
}

}  // namespace
