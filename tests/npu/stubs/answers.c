/* The few CANN functions whose answer matters while torch_npu is imported: build.py makes every
   other one return 0, and leaves out of its own list whatever this file defines. */

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* An Atlas A3's; torch_npu refuses a name that it does not know. */
const char *aclrtGetSocName(void) {
    const char *name = getenv("STUB_SOC_NAME");
    return name ? name : "Ascend910_9391";
}

/* The toolkit's version: a package's description begins with it. */
static const char *VERSION = "8.5.0";
int aclsysGetCANNVersion(int package, char *description) { strcpy(description, VERSION); return 0; }
int aclsysGetVersionStr(const char *package, char *text) { strcpy(text, VERSION); return 0; }

const char *aclGetRecentErrMsg(void) { return "a stub stands here for CANN"; }

/* The bounded string functions in which error messages are put together. */
int vsnprintf_s(char *out, size_t room, size_t count, const char *format, va_list values) {
    return vsnprintf(out, room < count + 1 ? room : count + 1, format, values);
}
int snprintf_s(char *out, size_t room, size_t count, const char *format, ...) {
    va_list values;
    va_start(values, format);
    int written = vsnprintf_s(out, room, count, format, values);
    va_end(values);
    return written;
}
int strcpy_s(char *out, size_t room, const char *text) { return snprintf(out, room, "%s", text) < 0; }
