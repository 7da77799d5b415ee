// A libnvidia-ml.so.1 that answers from the text file $FAKE_NVML.
//
// A line is "KEY VALUE", "KEY.GPU VALUE" or "KEY.GPU.LINK VALUE"; the most specific one counts.
// "xid.GPU CODE" is an event of that GPU, once per GPU.  Without a line a value is that of an idle DGX H100: eight GPUs, each with 18 NVLinks to switches.
// The value "-" means that the device does not support the query (NVML_ERROR_NOT_SUPPORTED).  "init"
// is the status of nvmlInit, "lost" that of a device's handle, and "hang" makes nvmlInit never return.
// tests/fake_nvml.py compiles it.  Structures and numbers are those of NVML's header nvml.h.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char text[32];
} Pci;

static char found[256];

// Return the value of a key for a GPU and link (-1: of neither), or the default.
static const char *get(const char *key, int gpu, int link, const char *otherwise) {
    char names[3][64], name[64], value[192];
    int count = 0, best = -1;
    if (link >= 0) snprintf(names[count++], 64, "%s.%d.%d", key, gpu, link);
    if (gpu >= 0) snprintf(names[count++], 64, "%s.%d", key, gpu);
    snprintf(names[count++], 64, "%s", key);
    FILE *file = fopen(getenv("FAKE_NVML") ? getenv("FAKE_NVML") : "", "r");
    while (file && fscanf(file, "%63s %191[^\n]\n", name, value) == 2)
        for (int n = 0; n < count; n++)
            if (!strcmp(name, names[n]) && (best < 0 || n <= best)) {
                best = n;
                strcpy(found, value);
            }
    if (file) fclose(file);
    return best < 0 ? otherwise : found;
}

static int number(const char *key, void *gpu, int link, const char *otherwise, unsigned long long *out) {
    const char *text = get(key, gpu ? (int)(long)gpu - 1 : -1, link, otherwise);
    if (!strcmp(text, "-")) return 3;
    *out = strtoull(text, 0, 0);
    return 0;
}

static int small(const char *key, void *gpu, int link, const char *otherwise, unsigned *out) {
    unsigned long long value = 0;
    int status = number(key, gpu, link, otherwise, &value);
    *out = (unsigned)value;
    return status;
}

int nvmlInitWithFlags(unsigned flags) {
    if (atoi(get("hang", -1, -1, "0"))) pause();
    return atoi(get("init", -1, -1, "0"));
}
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int status) {
    return status == 18 ? "Driver/library version mismatch" : status == 15 ? "GPU is lost" : "Unknown Error";
}
int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    snprintf(out, size, "%s", get("driver", -1, -1, "580.65.06"));
    return 0;
}
int nvmlSystemGetCudaDriverVersion(int *out) { return small("cuda", 0, -1, "13000", (unsigned *)out); }
int nvmlDeviceGetCount_v2(unsigned *out) { return small("count", 0, -1, "8", out); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
    *out = (void *)(long)(index + 1);
    return atoi(get("lost", index, -1, "0"));
}
int nvmlDeviceGetName(void *gpu, char *out, unsigned size) {
    snprintf(out, size, "%s", get("name", (int)(long)gpu - 1, -1, "NVIDIA H100 80GB HBM3"));
    return 0;
}
static int pci(unsigned bus, Pci *out) {
    memset(out, 0, sizeof *out);
    out->bus = bus;
    snprintf(out->text, 32, "00000000:%02X:00.0", bus);
    return 0;
}
int nvmlDeviceGetPciInfo_v3(void *gpu, Pci *out) { return pci(16 + (unsigned)(long)gpu - 1, out); }
int nvmlDeviceGetMemoryInfo(void *gpu, unsigned long long *out) {
    number("memory", gpu, -1, "85520809984", &out[0]);
    number("used", gpu, -1, "4194304", &out[2]);
    out[1] = out[0] - out[2];
    return 0;
}
int nvmlDeviceGetUtilizationRates(void *gpu, unsigned *out) {
    out[1] = 0;
    return small("utilization", gpu, -1, "0", &out[0]);
}
int nvmlDeviceGetTemperature(void *gpu, int sensor, unsigned *out) { return small("celsius", gpu, -1, "34", out); }
int nvmlDeviceGetPowerUsage(void *gpu, unsigned *out) { return small("milliwatts", gpu, -1, "71230", out); }
int nvmlDeviceGetClockInfo(void *gpu, int kind, unsigned *out) { return small("clock", gpu, -1, "1980", out); }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *gpu, unsigned long long *out) {
    return number("reasons", gpu, -1, "1", out);
}
int nvmlDeviceGetTotalEccErrors(void *gpu, int kind, int counter, unsigned long long *out) {
    return number(kind == 1 && counter == 0 ? "ecc" : "other_ecc", gpu, -1, "0", out);
}
int nvmlDeviceGetRemappedRows(void *gpu, unsigned *a, unsigned *b, unsigned *pending, unsigned *failed) {
    *a = *b = 0;
    small("remap_failed", gpu, -1, "0", failed);
    return small("remap_pending", gpu, -1, "0", pending);
}
int nvmlDeviceGetCurrPcieLinkWidth(void *gpu, unsigned *out) { return small("width", gpu, -1, "16", out); }
int nvmlDeviceGetMaxPcieLinkWidth(void *gpu, unsigned *out) { return small("max_width", gpu, -1, "16", out); }
int nvmlDeviceGetMigMode(void *gpu, unsigned *now, unsigned *pending) {
    *pending = 0;
    return small("mig", gpu, -1, "0", now);
}
int nvmlDeviceGetNvLinkState(void *gpu, unsigned link, unsigned *out) {
    return small("link", gpu, link, link < 18 ? "1" : "-", out);
}
int nvmlDeviceGetNvLinkErrorCounter(void *gpu, unsigned link, int counter, unsigned long long *out) {
    return number(counter == 1 ? "recoveries" : "other_errors", gpu, link, "0", out);
}
// 0: a GPU, 2: a switch.
int nvmlDeviceGetNvLinkRemoteDeviceType(void *gpu, unsigned link, unsigned *out) {
    return small("remote", gpu, link, "2", out);
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *gpu, unsigned link, Pci *out) {
    unsigned bus;
    int status = small("remote_bus", gpu, link, "-", &bus);
    return status ? status : pci(bus, out);
}
typedef struct {
    void *gpu;
    unsigned long long kind, value;
    unsigned instances[2];
} Event;
int nvmlEventSetCreate(void **out) {
    *out = (void *)1;
    return 0;
}
int nvmlDeviceRegisterEvents(void *gpu, unsigned long long kinds, void *set) { return kinds == 8 ? 0 : 2; }
int nvmlEventSetWait_v2(void *set, Event *out, unsigned milliseconds) {
    static char is_reported[64];
    for (int gpu = 0; gpu < 64; gpu++) {
        int code = atoi(get("xid", gpu, -1, "0"));
        if (code && !is_reported[gpu]) {
            is_reported[gpu] = 1;
            *out = (Event){(void *)(long)(gpu + 1), 8, code, {0, 0}};
            return 0;
        }
    }
    usleep(milliseconds * 100);
    return 10;  // NVML_ERROR_TIMEOUT
}
int nvmlDeviceGetTopologyCommonAncestor(void *gpu, void *other, unsigned *out) {
    return small("ancestor", gpu, (int)(long)other - 1, "50", out);
}
