// The C interface: what of a plan is served, and by which kernel.
#include "attnkit.h"

#include <cstring>
#include <iterator>
#include <new>
#include <optional>

#include "door.h"
#include "packed.h"
#include "subnormals.h"
#include "team.h"

namespace attnkit {
namespace {

bool is_float(int dtype) { return dtype >= ATTNKIT_FLOAT64 && dtype <= ATTNKIT_FLOAT16; }
bool is_integer(int dtype) { return dtype >= ATTNKIT_INT32 && dtype <= ATTNKIT_UINT8; }

bool legal_dtype(const attnkit_plan &plan, int array) {
  const int dtype = plan.arrays[array].dtype, of_tokens = plan.arrays[ATTNKIT_Q].dtype;
  const int compute = of_tokens == ATTNKIT_FLOAT64 ? ATTNKIT_FLOAT64 : ATTNKIT_FLOAT32;
  switch (array) {
    case ATTNKIT_Q:
    case ATTNKIT_BIAS:
    case ATTNKIT_DROPOUT_MASK:
    case ATTNKIT_LENGTHS:
    case ATTNKIT_ALPHA:
    case ATTNKIT_SINK:
    case ATTNKIT_PROJECTION:
    case ATTNKIT_STATE:
    case ATTNKIT_NORMALISER:
    case ATTNKIT_LEVEL:
    case ATTNKIT_LOG_DECAY:
    case ATTNKIT_LOG_FORGET:
    case ATTNKIT_BETA:
    case ATTNKIT_LOG_GATE:
    case ATTNKIT_O:
    case ATTNKIT_DO:
    case ATTNKIT_DFINAL_STATE:
    case ATTNKIT_DFINAL_NORMALISER:
    case ATTNKIT_DFINAL_LEVEL:
    case ATTNKIT_DQ:
    case ATTNKIT_DK:
    case ATTNKIT_DV:
    case ATTNKIT_DBIAS:
    case ATTNKIT_DALPHA:
    case ATTNKIT_DSINK:
    case ATTNKIT_DSTATE:
    case ATTNKIT_DNORMALISER:
    case ATTNKIT_DLEVEL:
    case ATTNKIT_DLOG_DECAY:
    case ATTNKIT_DLOG_FORGET:
    case ATTNKIT_DBETA:
    case ATTNKIT_DLOG_GATE:
      return is_float(dtype);
    case ATTNKIT_K:
    case ATTNKIT_V:
      return dtype == of_tokens;
    case ATTNKIT_MASK:
    case ATTNKIT_QUERY_MASK:
      return dtype == ATTNKIT_BOOL;
    case ATTNKIT_KEY_LENGTHS:
    case ATTNKIT_SEED:
      return is_integer(dtype);
    case ATTNKIT_EDGES_Q:
    case ATTNKIT_EDGES_K:
      return dtype == ATTNKIT_INT32 || dtype == ATTNKIT_INT64;
    default:
      return dtype == compute;
  }
}

constexpr struct {
  const char *name;
  int number;
} kActivations[] = {
    {"relu", ATTNKIT_RELU},         {"relu_squared", ATTNKIT_RELU_SQUARED}, {"gelu", ATTNKIT_GELU},
    {"gelu_tanh", ATTNKIT_GELU_TANH}, {"softplus", ATTNKIT_SOFTPLUS},       {"identity", ATTNKIT_IDENTITY},
    {"relu6", ATTNKIT_RELU6},       {"sigmoid", ATTNKIT_SIGMOID},           {"silu", ATTNKIT_SILU},
};
static_assert(std::size(kActivations) == ATTNKIT_ACTIVATIONS, "an activation without a name");

bool legal_size(int64_t n) { return n >= 0 && n < (int64_t{1} << 31); }

// Arrays that a plan of this kind must have, where they have elements.
bool lacks_arrays(const attnkit_plan &plan) {
  const auto absent = [&plan](int array) { return plan.arrays[array].dtype == ATTNKIT_ABSENT; };
  if (absent(ATTNKIT_Q) || absent(ATTNKIT_K)) return true;
  if (plan.length_kind == ATTNKIT_LENGTH_ARRAY && absent(ATTNKIT_LENGTHS)) return true;
  if (plan.op == ATTNKIT_FORGETTING && absent(ATTNKIT_LOG_FORGET)) return true;
  if (plan.op == ATTNKIT_GATED_LINEAR && absent(ATTNKIT_LOG_GATE)) return true;
  if (plan.op == ATTNKIT_DELTA && absent(ATTNKIT_BETA)) return true;
  return plan.pass == ATTNKIT_FORWARD && !absent(ATTNKIT_O) && absent(ATTNKIT_V);
}

bool has_statistics(const attnkit_plan &plan) {
  for (int array : {ATTNKIT_TOTAL, ATTNKIT_ENTROPY, ATTNKIT_SUM_SQUARES, ATTNKIT_MAXIMUM, ATTNKIT_NONZERO,
                    ATTNKIT_VISIBLE, ATTNKIT_DTOTAL, ATTNKIT_DENTROPY, ATTNKIT_DSUM_SQUARES, ATTNKIT_DMAXIMUM})
    if (plan.arrays[array].dtype != ATTNKIT_ABSENT) return true;
  return false;
}

int check(const attnkit_plan &plan) {
  if (plan.size != sizeof(attnkit_plan) || plan.version != ATTNKIT_VERSION) return ATTNKIT_BAD_PLAN;
  if (!legal_size(plan.queries) || !legal_size(plan.keys) || !legal_size(plan.features) || !legal_size(plan.values) ||
      plan.key_length < 0)
    return ATTNKIT_BAD_SIZE;
  for (int64_t size : plan.axes)
    if (!legal_size(size)) return ATTNKIT_BAD_SIZE;
  if (lacks_arrays(plan)) return ATTNKIT_BAD_ARRAY;
  for (int array = 0; array < ATTNKIT_ARRAYS; ++array) {
    if (plan.arrays[array].dtype == ATTNKIT_ABSENT) continue;
    if (!legal_dtype(plan, array)) return ATTNKIT_BAD_DTYPE;
    if (overlaps_itself(plan, array)) return ATTNKIT_BAD_ARRAY;
  }
  if (plan.op < ATTNKIT_POINTWISE || plan.op > ATTNKIT_DELTA) return ATTNKIT_UNSUPPORTED;
  constexpr int64_t kCountable = int64_t{1} << 24;  // integers that a float has: rows save the key of their maximum
  if (plan.op == ATTNKIT_SOFTPICK && plan.keys > kCountable) return ATTNKIT_UNSUPPORTED;
  if (plan.op == ATTNKIT_STICK_BREAKING && has_statistics(plan)) return ATTNKIT_UNSUPPORTED;
  if (plan.op != ATTNKIT_FORGETTING && plan.arrays[ATTNKIT_LOG_FORGET].dtype != ATTNKIT_ABSENT) return ATTNKIT_UNSUPPORTED;
  if ((is_linear(plan) || is_recurrent(plan)) && plan.arrays[ATTNKIT_MASK].row != 0) return ATTNKIT_UNSUPPORTED;
  if (is_recurrent(plan) && (plan.queries != plan.keys || plan.highest != 0)) return ATTNKIT_UNSUPPORTED;
  if (is_packed(plan) && !can_be_packed(plan)) return ATTNKIT_UNSUPPORTED;
  if (plan.pass != ATTNKIT_FORWARD && plan.pass != ATTNKIT_BACKWARD) return ATTNKIT_BAD_PLAN;
  if (plan.activation < 0 || plan.activation >= ATTNKIT_ACTIVATIONS) return ATTNKIT_BAD_PLAN;
  if (plan.feature_map < ATTNKIT_ELU_PLUS_ONE || plan.feature_map > ATTNKIT_RELU_KERNEL) return ATTNKIT_BAD_PLAN;
  return ATTNKIT_OK;
}

void serve(const Call &call) {
  switch (call.plan.op) {
    case ATTNKIT_SOFTMAX:
    case ATTNKIT_FORGETTING:
      return softmax(call);
    case ATTNKIT_SOFTPICK:
      return softpick(call);
    case ATTNKIT_STICK_BREAKING:
      return stick_breaking(call);
    case ATTNKIT_GAUSSIAN:
      return gaussian(call);
    case ATTNKIT_ENTMAX:
      if (call.has(ATTNKIT_ALPHA)) return entmax(call);
      return call.plan.alpha == 2 ? sparsemax(call) : call.plan.alpha == 1.5 ? entmax_of_halves(call) : entmax(call);
    case ATTNKIT_LINEAR:
    case ATTNKIT_COSINE:
    case ATTNKIT_PERFORMER:
      return linear(call);
    case ATTNKIT_EFFICIENT:
      return efficient(call);
    case ATTNKIT_GATED_LINEAR:
    case ATTNKIT_DELTA:
      return delta(call);
    default:
      return pointwise(call);
  }
}

}  // namespace
}  // namespace attnkit

extern "C" {

int attnkit_check(const attnkit_plan *plan) { return attnkit::check(*plan); }

int attnkit_run(const attnkit_plan *plan, const int64_t *places, int64_t count, void *const *pointers, int threads,
                attnkit_openmp openmp) {
  const int code = attnkit::check(*plan);
  if (code != ATTNKIT_OK) return code;
  const attnkit::Door door(*plan, places, count, pointers);
  if (door.code() != ATTNKIT_OK) return door.code();
  attnkit::Call call{*plan, door.arrays(), threads};
  if (attnkit::is_packed(*plan) && !attnkit::edges_rise(call)) return ATTNKIT_BAD_EDGES;
  if (!door.has_outputs()) return ATTNKIT_OK;
  std::optional<attnkit::Interrupt> interrupt;  // not where XLA calls: its own error would hide the signal
  if (attnkit::lent_host == nullptr) {
    attnkit::Pool::own().allow(std::max(1, threads) - 1);
    call.interrupt = &interrupt.emplace();
  }
  attnkit::Team team(openmp, threads);
  const attnkit::Host host{attnkit::Team::enlist, &team};
  std::optional<attnkit::Lent> lent;
  if (openmp != nullptr) lent.emplace(host);
  const attnkit::ReadsSubnormals here;
  try {
    attnkit::is_packed(*plan) ? attnkit::serve_each(call, attnkit::serve) : attnkit::serve(call);
  } catch (const std::bad_alloc &) {
    return ATTNKIT_NO_MEMORY;
  } catch (const attnkit::Interrupted &) {
    return ATTNKIT_INTERRUPTED;
  }
  return ATTNKIT_OK;
}

void attnkit_listen(int (*ensure)(), void (*release)(int), int (*occurred)(), void (*set)()) {
  attnkit::interpreter = {ensure, release, occurred, set};
}

int attnkit_activation(const char *name) {
  for (const auto &known : attnkit::kActivations)
    if (std::strcmp(known.name, name) == 0) return known.number;
  return ATTNKIT_NO_ACTIVATION;
}

const char *attnkit_message(int code) {
  switch (code) {
    case ATTNKIT_OK:
      return "served";
    case ATTNKIT_BAD_PLAN:
      return "the plan is not one of this library's version";
    case ATTNKIT_BAD_SIZE:
      return "a size is negative or beyond 2^31";
    case ATTNKIT_BAD_ARRAY:
      return "an array is missing, overlaps itself, or is not described by the plan";
    case ATTNKIT_BAD_DTYPE:
      return "an array has a dtype that it may not have";
    case ATTNKIT_BAD_ALIGNMENT:
      return "an array is not aligned to its elements";
    case ATTNKIT_UNSUPPORTED:
      return "the library does not serve this call";
    case ATTNKIT_NO_MEMORY:
      return "working memory could not be allocated";
    case ATTNKIT_INTERRUPTED:
      return "a signal ended the call";
    case ATTNKIT_BAD_EDGES:
      return "cu_seqlens_q and cu_seqlens_k must rise from 0 to the number of tokens";
    default:
      return "unknown code";
  }
}

int attnkit_level(void) {
#if defined(__AMX_BF16__)
  return 6;
#elif defined(__AVX512BF16__)
  return 5;
#elif defined(__AVX512F__)
  return 4;
#elif defined(__AVX2__)
  return 3;
#else
  return 1;
#endif
}
}
