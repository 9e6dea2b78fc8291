/* The GPUs and the environment, both read once per process.
 *
 *   FUSED_MOE_TIER       portable (sm80), hopper (sm90), or auto (the default): the best tier that takes the
 *                        call. hopper is as auto on a Hopper GPU, and an error on any other
 *   FUSED_MOE_SCHEDULE   overrides for experiments, e.g. order=linear,experts=in-turn,tails=off,group=8; and
 *                        codes=N: up to N rows per expert, GEMMs read quantised weights as they are */
#include "device.cuh"

#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <mutex>

#include "dispatch.cuh"

namespace fused_moe {

typedef struct {
    std::atomic<bool> known;
    int status; /* why no CUDA tier runs there, or FUSED_MOE_OK */
    FusedMoeCudaDevice versions;
    DeviceFacts facts;
} Device;

static struct {
    std::mutex mutex;
    std::atomic<bool> known;
    int32_t tier; /* asked for by name: FusedMoeTier, -1 for auto, -2 for an unknown name */
    ScheduleOverride schedule;
    Device devices[MAX_DEVICES];
} process;

static thread_local cudaError_t last_error = cudaSuccess;

int cuda_status(cudaError_t error) {
    if (error == cudaSuccess) return FUSED_MOE_OK;
    last_error = error;
    return FUSED_MOE_CUDA_ERROR;
}

static void read_environment() {
    const char *tier = getenv("FUSED_MOE_TIER"), *schedule = getenv("FUSED_MOE_SCHEDULE");
    process.tier = !tier || !*tier || !strcmp(tier, "auto") ? -1 : -2;
    for (int i = 0; tier && i < FUSED_MOE_NUM_TIERS; i++)
        if (!strcmp(tier, fused_moe_tier(i).name)) process.tier = i;
    ScheduleOverride s = {};
    s.quantized_rows = -1;
    if (schedule) {
        const char *group = strstr(schedule, "group=");
        if (group) s.group = atoi(group + strlen("group="));
        if (strstr(schedule, "order=linear")) s.group = 1;
        if (strstr(schedule, "order=column")) s.group = INT32_MAX;
        const char *quantized_rows = strstr(schedule, "codes=");
        if (quantized_rows) s.quantized_rows = atoi(quantized_rows + strlen("codes="));
        s.no_interleave = strstr(schedule, "experts=in-turn");
        s.no_tails = strstr(schedule, "tails=off");
    }
    process.schedule = s;
}

static int read_device(int index, Device *d) {
    int major = 0, minor = 0, num_sms = 0;
    cudaDriverGetVersion(&d->versions.driver_version);
    cudaRuntimeGetVersion(&d->versions.runtime_version);
    cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, index);
    cudaGetLastError(); /* a failed question must not show up as a later launch's error */
    d->versions.capability = d->facts.capability = 10 * major + minor;
    d->facts.num_sms = num_sms;
    d->facts.runs_sm90 = fused_moe_tier_runs_on(FUSED_MOE_TIER_SM90, d->facts.capability);
    if (error == cudaErrorInsufficientDriver) return FUSED_MOE_DRIVER_TOO_OLD;
    if (error != cudaSuccess) return cuda_status(error);
    int32_t capability = d->facts.capability;
    if (!fused_moe_tier_runs_on(LAST_TIER, capability)) return FUSED_MOE_UNSUPPORTED_GPU;
    int asked = process.tier == -1 ? LAST_TIER : process.tier;
    return asked >= 0 && fused_moe_tier_runs_on(asked, capability) ? FUSED_MOE_OK : FUSED_MOE_NO_SUCH_TIER;
}

/* The device's entry, read on its first use; NULL: no such index. */
static const Device *device_at(int index) {
    if (index < 0 || index >= MAX_DEVICES) return nullptr;
    Device *d = &process.devices[index];
    if (process.known.load(std::memory_order_acquire) && d->known) return d;
    std::lock_guard<std::mutex> lock(process.mutex);
    if (!process.known.load(std::memory_order_relaxed)) read_environment();
    if (!d->known) d->status = read_device(index, d);
    d->known = d->status == FUSED_MOE_OK || d->status == FUSED_MOE_NO_SUCH_TIER; /* others may be passing */
    process.known.store(true, std::memory_order_release);
    return d;
}

const DeviceFacts &current_device() {
    int index = 0;
    cudaGetDevice(&index);
    const Device *d = device_at(index);
    static const DeviceFacts none = {};
    return d ? d->facts : none;
}

const ScheduleOverride &schedule_override() {
    current_device();
    return process.schedule;
}

FusedMoeReason device_reason(int tier) {
    if (!fused_moe_tier_runs_on(tier, current_device().capability)) return FUSED_MOE_OTHER_GPU;
    return process.tier > tier ? FUSED_MOE_OTHER_TIER_ASKED : FUSED_MOE_RUNS;
}

} // namespace fused_moe

/* --- the C interface ------------------------------------------------------------------------------------ */

using namespace fused_moe;

extern "C" {

int fused_moe_cuda_device(int device, FusedMoeCudaDevice *found) {
    const Device *d = device_at(device);
    *found = d ? d->versions : FusedMoeCudaDevice{};
    return d ? d->status : cuda_status(cudaErrorInvalidDevice);
}

void fused_moe_cuda_reset(void) {
    std::lock_guard<std::mutex> lock(process.mutex);
    process.known.store(false, std::memory_order_release);
    for (Device &d : process.devices) d.known = false;
}

const char *fused_moe_cuda_error(void) {
    return cudaGetErrorString(last_error);
}

} // extern "C"
