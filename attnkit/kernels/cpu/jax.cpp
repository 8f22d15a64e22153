// attnkit_run as a custom call of XLA, through the C interface alone.
//
// xla/ffi/api/c_api.h is that of jaxlib 0.8.2 (OpenXLA, Apache License 2.0), the oldest that is supported: XLA refuses
// handlers built for a newer interface than its own, and all of JAX with them.
//
// The arguments of the custom call are the inputs, its results the outputs. Attributes, arrays of int64: `places`, the
// `enum attnkit_array` of each argument and result; `plan`, the bytes of an attnkit_plan; `threads`, one number.
#include "attnkit.h"
#include "memory.h"
#include "team.h"
#include "xla/ffi/api/c_api.h"

#include <cstring>
#include <vector>

namespace {

using attnkit::Job;

XLA_FFI_Error *failure(const XLA_FFI_CallFrame *frame, const char *message, XLA_FFI_Error_Code code) {
  XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, message, code};
  return frame->api->XLA_FFI_Error_Create(&args);
}

// Ask threads of XLA's own pool to help. They may come when the call is over: then the job is empty.
void enlist(void *host, int helpers, const std::shared_ptr<Job> &job) {
  const auto *frame = static_cast<const XLA_FFI_CallFrame *>(host);
  for (int i = 0; i < helpers; ++i) {
    auto *shared = new std::shared_ptr<Job>(job);
    const auto help = [](void *data) {
      const std::unique_ptr<std::shared_ptr<Job>> mine(static_cast<std::shared_ptr<Job> *>(data));
      (*mine)->work();
    };
    XLA_FFI_ThreadPool_Schedule_Args args{XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, nullptr, frame->ctx, help,
                                          shared};
    if (XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_Schedule(&args)) {
      XLA_FFI_Error_Destroy_Args destroy{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
      frame->api->XLA_FFI_Error_Destroy(&destroy);
      delete shared;
      return;
    }
  }
}

// A result as a whole, whatever a plan says of it. Results are float64, or float32 and shorter.
void poison(const XLA_FFI_Buffer &buffer) {
  uint64_t count = 1;
  for (int64_t axis = 0; axis < buffer.rank; ++axis) count *= static_cast<uint64_t>(buffer.dims[axis]);
  const uint64_t size = buffer.dtype == XLA_FFI_DataType_F64 ? 8 : buffer.dtype == XLA_FFI_DataType_F32 ? 4 : 2;
  attnkit::poison(buffer.data, count * size);
}

const XLA_FFI_Array *attribute(const XLA_FFI_CallFrame *frame, const char *name) {
  const XLA_FFI_Attrs &attrs = frame->attrs;
  for (int64_t i = 0; i < attrs.size; ++i) {
    const XLA_FFI_ByteSpan &span = *attrs.names[i];
    if (span.len != std::strlen(name) || std::memcmp(span.ptr, name, span.len) != 0) continue;
    if (attrs.types[i] != XLA_FFI_AttrType_ARRAY) return nullptr;
    const auto *array = static_cast<const XLA_FFI_Array *>(attrs.attrs[i]);
    return array->dtype == XLA_FFI_DataType_S64 ? array : nullptr;
  }
  return nullptr;
}

}  // namespace

extern "C" ATTNKIT_API XLA_FFI_Error *attnkit_jax(XLA_FFI_CallFrame *frame) {
  for (auto *extension = frame->extension_start; extension != nullptr; extension = extension->next) {
    if (extension->type != XLA_FFI_Extension_Metadata) continue;
    XLA_FFI_Metadata *metadata = reinterpret_cast<XLA_FFI_Metadata_Extension *>(extension)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    metadata->traits = 0;
    metadata->state_type_id = XLA_FFI_TypeId{0};
    return nullptr;
  }
  const XLA_FFI_Array *places = attribute(frame, "places");
  const XLA_FFI_Array *bytes = attribute(frame, "plan");
  const XLA_FFI_Array *threads = attribute(frame, "threads");
  const int64_t inputs = frame->args.size, outputs = frame->rets.size;
  if (places == nullptr || bytes == nullptr || threads == nullptr || threads->size != 1 ||
      static_cast<int64_t>(places->size) != inputs + outputs || bytes->size * sizeof(int64_t) != sizeof(attnkit_plan)) {
    return failure(frame, "attnkit: malformed custom call", XLA_FFI_Error_Code_INVALID_ARGUMENT);
  }
  attnkit_plan plan;
  std::memcpy(&plan, bytes->data, sizeof plan);
  std::vector<void *> pointers(static_cast<size_t>(inputs + outputs));
  for (int64_t i = 0; i < inputs + outputs; ++i) {
    void *buffer = i < inputs ? frame->args.args[i] : frame->rets.rets[i - inputs];
    pointers[static_cast<size_t>(i)] = static_cast<XLA_FFI_Buffer *>(buffer)->data;
    if (attnkit::poisons && i >= inputs) poison(*static_cast<XLA_FFI_Buffer *>(buffer));
  }
  const attnkit::Host host{enlist, frame};
  const attnkit::Lent lent(host);
  const int code = attnkit_run(&plan, static_cast<const int64_t *>(places->data), inputs + outputs, pointers.data(),
                               static_cast<int>(*static_cast<const int64_t *>(threads->data)), nullptr);
  if (code == ATTNKIT_OK) return nullptr;
  const auto kind = code == ATTNKIT_NO_MEMORY ? XLA_FFI_Error_Code_RESOURCE_EXHAUSTED : XLA_FFI_Error_Code_INTERNAL;
  return failure(frame, attnkit_message(code), kind);
}
