/* A device without a processor: where STUB_DEVICES says how many there are, streams and events can
   be made, memory is the host's, copies happen at once, and a capture captures nothing. Operators
   have no kernels there. torch_npu looks most of these up by name when it first needs them. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, NO_CONTEXT = 107002, CAPTURING = 107027, MEMORY_FULL = 207001 };

static _Thread_local int current = -1;
static void *capturing;  /* the stream on which a capture has begun */
static void *captured;
static const size_t MEMORY = 64UL << 30;

int aclrtGetDeviceCount(uint32_t *count) {
    const char *devices = getenv("STUB_DEVICES");
    *count = devices ? atoi(devices) : 0;
    return OK;
}
int aclrtSetDevice(int32_t device) { current = device; return OK; }
int aclrtGetDevice(int32_t *device) { *device = current < 0 ? 0 : current; return current < 0 ? NO_CONTEXT : OK; }
int aclrtGetCurrentContext(void **context) { *context = &current; return OK; }
int aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    if (flags) *flags = 0;
    *active = device == current;
    return OK;
}
int aclrtSetDeviceSatMode(int mode) { return OK; }

/* Memory. */
static int allocated(void **out, size_t size) {
    return posix_memalign(out, 512, size ? size : 512) ? MEMORY_FULL : OK;
}
int aclrtMalloc(void **out, size_t size, int policy) { return allocated(out, size); }
int aclrtMallocAlign32(void **out, size_t size, int policy) { return allocated(out, size); }
int aclrtMallocHost(void **out, size_t size) { return allocated(out, size); }
int aclrtMallocHostWithCfg(void **out, uint64_t size, void *config) { return allocated(out, size); }
int aclrtFree(void *memory) { free(memory); return OK; }
int aclrtFreeHost(void *memory) { free(memory); return OK; }
int aclrtGetMemInfo(int kind, size_t *unused, size_t *total) { *unused = *total = MEMORY; return OK; }
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t count, int kind, void *stream) {
    memmove(to, from, count);
    return OK;
}
int aclrtMemset(void *to, size_t room, int32_t value, size_t count) { memset(to, value, count); return OK; }
int aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t count, void *stream) {
    memset(to, value, count);
    return OK;
}

/* Streams and events: whatever is enqueued has happened. */
static int handle(void **out) { *out = calloc(1, 64); return OK; }
int aclrtCreateStream(void **stream) { return handle(stream); }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) { return handle(stream); }
int aclrtStreamQuery(void *stream, int *status) { *status = 0; return OK; }
int aclrtStreamGetId(void *stream, int32_t *id) { *id = (int32_t)(intptr_t)stream; return OK; }
int aclrtSetStreamFailureMode(void *stream, uint64_t mode) { return OK; }
int aclrtSetStreamAttribute(void *stream, int attribute, void *value) { return OK; }
int aclrtCreateEventWithFlag(void **event, uint32_t flag) { return handle(event); }
int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { return handle(event); }
int aclrtQueryEventStatus(void *event, int *status) { *status = 1; return OK; }
int aclrtQueryEventWaitStatus(void *event, int *status) { *status = 1; return OK; }
int aclrtEventElapsedTime(float *milliseconds, void *start, void *end) { *milliseconds = 0; return OK; }
int aclrtPeekAtLastError(int level) { return OK; }
int aclrtGetLastError(int level) { return OK; }

/* Waiting for the device is what a capture cannot hold. */
static int waited(void) { return capturing ? CAPTURING : OK; }
int aclrtSynchronizeStream(void *stream) { return waited(); }
int aclrtSynchronizeStreamWithTimeout(void *stream, int32_t timeout) { return waited(); }
int aclrtSynchronizeDevice(void) { return waited(); }
int aclrtSynchronizeDeviceWithTimeout(int32_t timeout) { return waited(); }
int aclrtSynchronizeEvent(void *event) { return waited(); }
int aclrtMemcpy(void *to, size_t room, const void *from, size_t count, int kind) {
    memmove(to, from, count);
    return waited();
}

/* Captured graphs: one capture at a time, on the stream it began on. */
int aclmdlRICaptureBegin(void *stream, int mode) { capturing = stream; return handle(&captured); }
int aclmdlRICaptureEnd(void *stream, void **model) { capturing = 0; *model = captured; return OK; }
int aclmdlRICaptureGetInfo(void *stream, int *status, void **model) {
    *status = capturing != 0 && capturing == stream;
    if (model) *model = captured;
    return OK;
}
int aclmdlRICaptureThreadExchangeMode(int *mode) { return OK; }
int aclmdlRIExecuteAsync(void *model, void *stream) { return OK; }
int aclmdlRIDestroy(void *model) { free(model); return OK; }
int aclmdlRICaptureTaskGrpBegin(void *stream) { return OK; }
int aclmdlRICaptureTaskGrpEnd(void *stream, void **group) { return handle(group); }
int aclmdlRICaptureTaskUpdateBegin(void *stream, void *group) { return OK; }
int aclmdlRICaptureTaskUpdateEnd(void *stream) { return OK; }

/* Settings that nothing here reads. */
int aclSetCompileopt(int option, const char *value) { return OK; }
int aclrtSetOpWaitTimeout(uint32_t seconds) { return OK; }
int aclrtSetOpExecuteTimeOut(uint32_t seconds) { return OK; }
int aclrtCtxSetSysParamOpt(int option, int64_t value) { return OK; }

size_t aclGetCompileoptSize(int option) { return 8; }
int aclGetCompileopt(int option, char *value, size_t room) { memset(value, 0, room); return OK; }
static int64_t options[64];
int aclrtGetSysParamOpt(int option, int64_t *value) { *value = options[option & 63]; return OK; }
int aclrtSetSysParamOpt(int option, int64_t value) { options[option & 63] = value; return OK; }
int aclrtDestroyStreamForce(void) { return OK; }
int aclrtGetDeviceInfo(uint32_t device, int what, int64_t *value) { *value = 1; return OK; }
int aclrtGetDeviceResLimit(int32_t device, int what, uint32_t *value) { *value = 1; return OK; }

/* No operator runs: better an error than memory that nothing wrote, unless STUB_OPERATORS is set. */
int aclopCompileAndExecute(void) { return getenv("STUB_OPERATORS") ? OK : 500001; }
int aclrtGetStreamResLimit(void *stream, int what, uint32_t *value) { *value = 1; return OK; }
int aclrtSetStreamResLimit(void *stream, int what, uint32_t value) { return OK; }
int aclrtUseStreamResInCurrentThread(void *stream) { return OK; }
int aclrtUnuseStreamResInCurrentThread(void *stream) { return OK; }
