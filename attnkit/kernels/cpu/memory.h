// Working memory: buffers that grow and are used again by the next task of a thread.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace attnkit {

// With the environment variable ATTNKIT_POISON, memory holds NaN whenever it is handed out, so that what was not written
// is seen: all bits are set, NaN in every float type and -1 in integers.
inline const bool poisons = std::getenv("ATTNKIT_POISON") != nullptr;

inline void poison(void *data, uint64_t bytes) {
  if (bytes > 0) std::memset(data, 0xff, bytes);
}

// An array of T at a multiple of 64 bytes with a vector to spare at its end.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size) { reserve(size); }
  Buffer(const Buffer &) = delete;
  Buffer &operator=(const Buffer &) = delete;
  ~Buffer() { release(); }

  T *data() const { return data_; }

  // Room for `size` elements of any contents; std::bad_alloc where there is none.
  T *reserve(int64_t size) {
    retain(size);
    if (poisons && data_ != nullptr) poison(data_, bytes(size));
    return data_;
  }

  // The same, with what was written since the buffer has that size.
  T *retain(int64_t size) {
    if (size > size_) grow(size);
    return data_;
  }

 private:
  static uint64_t bytes(int64_t size) { return (static_cast<uint64_t>(size) * sizeof(T) + 127) / 64 * 64; }

  void grow(int64_t size) {
    release();
#if defined(_WIN32)
    data_ = static_cast<T *>(_aligned_malloc(bytes(size), 64));
#else
    data_ = static_cast<T *>(std::aligned_alloc(64, bytes(size)));
#endif
    if (data_ == nullptr) throw std::bad_alloc();
    size_ = size;
  }

  void release() {
#if defined(_WIN32)
    _aligned_free(data_);
#else
    std::free(data_);
#endif
    data_ = nullptr;
    size_ = 0;
  }

  T *data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace attnkit
