#include "openmp.hpp"

#include <dlfcn.h>
#include <semaphore.h>

namespace ggml_clattn {

namespace {

/// GCC's OpenMP runtime, if the process has loaded it: what compilers call for a parallel region.
struct Runtime {
  using Work = void(void*);
  void (*start)(Work*, void*, unsigned num_threads) = nullptr;
  void (*end)() = nullptr;
  int (*num_threads)() = nullptr;
  int (*in_parallel)() = nullptr;

  Runtime() {
    void* const library = dlopen("libgomp.so.1", RTLD_NOLOAD | RTLD_LAZY);
    if (library == nullptr) return;
    find(library, "GOMP_parallel_start", start);
    find(library, "GOMP_parallel_end", end);
    find(library, "omp_get_num_threads", num_threads);
    find(library, "omp_in_parallel", in_parallel);
  }
  bool is_complete() const {
    return start != nullptr && end != nullptr && num_threads != nullptr && in_parallel != nullptr;
  }

 private:
  template <typename Function>
  static void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
  }
};

const Runtime& runtime() {
  static const Runtime loaded;
  return loaded;
}

}  // namespace

struct OpenMPAsleep::Team {
  sem_t awake;
  int num_asleep;
};

OpenMPAsleep::OpenMPAsleep(int num_threads) {
  if (num_threads < 2 || !runtime().is_complete() || runtime().in_parallel() != 0) return;
  team_ = new Team;
  sem_init(&team_->awake, 0, 0);
  // Every thread of the region but this one begins with the wait.
  runtime().start([](void* awake) { sem_wait(static_cast<sem_t*>(awake)); }, &team_->awake,
                  static_cast<unsigned>(num_threads));
  team_->num_asleep = runtime().num_threads() - 1;
}

OpenMPAsleep::~OpenMPAsleep() {
  if (team_ == nullptr) return;
  for (int i = 0; i < team_->num_asleep; ++i) sem_post(&team_->awake);
  runtime().end();
  sem_destroy(&team_->awake);
  delete team_;
}

}  // namespace ggml_clattn
