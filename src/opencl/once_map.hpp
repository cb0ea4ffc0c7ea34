#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace clattn::detail {

/// One shared object per key, made by the first who asks while the others wait. A Stored of
/// shared_ptr keeps objects for good, one of weak_ptr shares them while someone else keeps them.
/// When making throws, the next one who asks tries again.
template <typename Stored>
class OnceMap {
 public:
  using Pointer = std::shared_ptr<typename Stored::element_type>;

  template <typename Make>
  Pointer get(const std::string& key, const Make& make) {
    const std::shared_ptr<Slot> slot = slot_of(key);
    const std::lock_guard lock(slot->mutex);
    if (Pointer live = alive(slot->stored)) return live;
    Pointer made = make();
    slot->stored = made;
    return made;
  }
  /// The object of a key, null where it is not there.
  Pointer find(const std::string& key) {
    const std::shared_ptr<Slot> slot = slot_of(key);
    const std::lock_guard lock(slot->mutex);
    return alive(slot->stored);
  }

 private:
  struct Slot {
    std::mutex mutex;
    Stored stored;
  };

  static Pointer alive(const Pointer& pointer) { return pointer; }
  static Pointer alive(const std::weak_ptr<typename Stored::element_type>& pointer) {
    return pointer.lock();
  }

  std::shared_ptr<Slot> slot_of(const std::string& key) {
    const std::scoped_lock lock(mutex_);
    std::shared_ptr<Slot>& slot = slots_[key];
    if (!slot) slot = std::make_shared<Slot>();
    return slot;
  }

  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Slot>> slots_;
};

}  // namespace clattn::detail
