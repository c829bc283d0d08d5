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
    memory->total = 141ull << 30;
    memory->used = (unsigned long long)atoi(setting("FAKE_NVML_USED_GIB", "0")) << 30;
    memory->free = memory->total - memory->used;
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

// The health of GPU n is the n-th value of a list, separated by commas; the last holds for the rest.
static int number_of(void *gpu, const char *name, const char *otherwise) {
    const char *values = setting(name, otherwise);
    for (size_t skip = (size_t)gpu - 1; skip && strchr(values, ','); skip--) values = strchr(values, ',') + 1;
    return (int)strtol(values, NULL, 0);
}

int nvmlDeviceGetUtilizationRates(void *gpu, unsigned int *rates) {
    rates[0] = number_of(gpu, "FAKE_NVML_UTILIZATION", "98");
    rates[1] = 0;
    return 0;
}

int nvmlDeviceGetPowerUsage(void *gpu, unsigned int *milliwatts) {
    *milliwatts = 1000 * number_of(gpu, "FAKE_NVML_POWER", "650");
    return 0;
}

int nvmlDeviceGetTemperature(void *gpu, int sensor, unsigned int *celsius) {
    (void)sensor;
    *celsius = number_of(gpu, "FAKE_NVML_TEMPERATURE", "60");
    return 0;
}

int nvmlDeviceGetClockInfo(void *gpu, int kind, unsigned int *mhz) {
    (void)kind;
    *mhz = number_of(gpu, "FAKE_NVML_CLOCK", "1980");
    return 0;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *gpu, unsigned long long *bits) {
    *bits = number_of(gpu, "FAKE_NVML_SLOWED", "0");
    return 0;
}

int nvmlDeviceGetTotalEccErrors(void *gpu, int kind, int counter, unsigned long long *errors) {
    (void)kind, (void)counter;
    int value = number_of(gpu, "FAKE_NVML_ECC", "0");
    *errors = value;
    return value < 0 ? 3 : 0;  // NVML_ERROR_NOT_SUPPORTED
}

typedef struct { void *gpu; unsigned long long type, data; unsigned int gi, ci; } EventData;

static void *watched;

int nvmlEventSetCreate(void **set) { *set = &watched; return 0; }

int nvmlDeviceRegisterEvents(void *gpu, unsigned long long types, void *set) {
    (void)types, (void)set;
    watched = gpu;
    return 0;
}

int nvmlEventSetWait_v2(void *set, EventData *data, unsigned int milliseconds) {
    (void)set, (void)milliseconds;
    int xid = watched ? number_of(watched, "FAKE_NVML_XID", "0") : 0;
    data->data = xid;
    return xid ? 0 : 10;  // NVML_ERROR_TIMEOUT
}

int nvmlDeviceGetNvLinkState(void *gpu, unsigned int link, int *active) {
    *active = link < (unsigned int)number_of(gpu, "FAKE_NVML_NVLINKS", "18");
    return 0;
}

int nvmlDeviceGetCurrPcieLinkWidth(void *gpu, unsigned int *lanes) {
    *lanes = number_of(gpu, "FAKE_NVML_LANES", "16");
    return 0;
}

int nvmlDeviceGetMaxPcieLinkWidth(void *gpu, unsigned int *lanes) { (void)gpu; *lanes = 16; return 0; }
int nvmlDeviceGetMaxPcieLinkGeneration(void *gpu, unsigned int *number) { (void)gpu; *number = 5; return 0; }
