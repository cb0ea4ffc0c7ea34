# cmake -DINPUT= -DOUTPUT= -DSYMBOL= -P embed_file.cmake: writes a file's bytes as a C++ array.
file(READ ${INPUT} bytes HEX)
string(LENGTH "${bytes}" digits)
math(EXPR size "${digits} / 2")
string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}")
string(REGEX REPLACE "(........................................................................)"
       "\\1\n" bytes "${bytes}")
file(WRITE ${OUTPUT} "// Generated from ${INPUT}.
#include <cstddef>
namespace clattn::detail {
extern const unsigned char ${SYMBOL}[];
extern const std::size_t ${SYMBOL}_size;
const unsigned char ${SYMBOL}[] = {
${bytes}0};
const std::size_t ${SYMBOL}_size = ${size};
}  // namespace clattn::detail
")
