// The calls of NVML that nanoscale makes, for GPUs that are not there. The environment says what they are.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned long long total, free, used; } Memory;

static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value ? value : otherwise;
}

static unsigned int count(void) { return atoi(setting("FAKE_NVML_GPUS", "1")); }

int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned int flags) { (void)flags; return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { (void)code; return "an error of the fake NVML"; }

int nvmlDeviceGetCount_v2(unsigned int *number) { *number = count(); return 0; }

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **gpu) {
    if (index >= count()) return 2;  // NVML_ERROR_INVALID_ARGUMENT
    *gpu = (void *)(size_t)(index + 1);
    return 0;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **gpu) {
    return nvmlDeviceGetHandleByIndex_v2(atoi(uuid + strlen("GPU-fake-")), gpu);
}

int nvmlDeviceGetName(void *gpu, char *name, unsigned int length) {
    (void)gpu;
    snprintf(name, length, "%s", setting("FAKE_NVML_NAME", "NVIDIA H200"));
    return 0;
}

int nvmlDeviceGetUUID(void *gpu, char *uuid, unsigned int length) {
    snprintf(uuid, length, "GPU-fake-%zu", (size_t)gpu - 1);
    return 0;
}

int nvmlDeviceGetMemoryInfo(void *gpu, Memory *memory) {
    (void)gpu;
    memory->total = memory->free = 141ull << 30;
    memory->used = 0;
    return 0;
}

int nvmlDeviceGetCudaComputeCapability(void *gpu, int *major, int *minor) {
    (void)gpu;
    return sscanf(setting("FAKE_NVML_CAPABILITY", "9.0"), "%d.%d", major, minor) == 2 ? 0 : 2;
}

int nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    snprintf(version, length, "%s", setting("FAKE_NVML_DRIVER", "580.65.06"));
    return 0;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = atoi(setting("FAKE_NVML_CUDA", "13000"));
    return 0;
}

// The cores near GPU n are the n-th of the masks, hexadecimal and separated by commas; the last holds for the rest.
int nvmlDeviceGetCpuAffinity(void *gpu, unsigned int words, unsigned long *mask) {
    const char *masks = setting("FAKE_NVML_CORES", "ffffffffffffffff");
    for (size_t skip = (size_t)gpu - 1; skip && strchr(masks, ','); skip--) masks = strchr(masks, ',') + 1;
    memset(mask, 0, words * sizeof *mask);
    if (words) mask[0] = strtoul(masks, NULL, 16);
    return 0;
}
