#pragma once

namespace clattn::cli {

/// What the program was built from, "bbf0d10" or "bbf0d10-dirty"; "unknown" outside a repository.
const char* commit();

}  // namespace clattn::cli
