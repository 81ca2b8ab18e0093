/* Objects of CANN's graph engine (namespace ge) that torchair builds and destroys around a graph.
   They hold one std::shared_ptr each, whose destructor runs in torchair's own code: a constructor
   that left it as it is would have garbage freed. Nothing is compiled and nothing runs.

   A constructor gets the object, a function that returns an object gets the place for it first. */

#include <stdlib.h>
#include <string.h>

static void *zeroed(void *object, size_t words) { return memset(object, 0, words * sizeof(void *)); }

/* ge::AscendString: the shared pointer's first word is the text, and no one counts references. */
void _ZN2ge12AscendStringC1EPKc(char **self, const char *text) {
    self[0] = strdup(text ? text : "");
    self[1] = 0;
}
const char *_ZNK2ge12AscendString9GetStringEv(char **self) { return self[0] ? self[0] : ""; }
_Bool _ZNK2ge12AscendStringltERKS0_(char **self, char **other) {
    return strcmp(self[0] ? self[0] : "", other[0] ? other[0] : "") < 0;
}
_Bool _ZNK2ge12AscendStringeqERKS0_(char **self, char **other) {
    return strcmp(self[0] ? self[0] : "", other[0] ? other[0] : "") == 0;
}
void *_ZN2ge17GEGetWarningMsgV2Ev(void *out) { return zeroed(out, 2); }

/* std::string as it was before C++11: a pointer behind a header of length, capacity, references. */
static struct { long length, capacity, references; char text[64]; } message = {
    33, 63, 1L << 30, "a stub stands here for the engine"};
void *_ZN2ge13GEGetErrorMsgEv(char **out) { out[0] = message.text; return out; }

void *_ZN2ge5GraphC1EPKc(void *self) { return zeroed(self, 2); }
void *_ZN2ge5ShapeC1ERKSt6vectorIlSaIlEE(void *self) { return zeroed(self, 2); }
void *_ZN2ge10TensorDescC1Ev(void *self) { return zeroed(self, 2); }
void *_ZN2ge6TensorC1Ev(void *self) { return zeroed(self, 2); }

void *_ZNK2ge5Graph11GetAllNodesEv(void *out) { return zeroed(out, 3); }
void *_ZNK2ge5Shape7GetDimsEv(void *out) { return zeroed(out, 3); }
void *_ZNK2ge10TensorDesc8GetShapeEv(void *out) { return zeroed(out, 2); }
void *_ZNK2ge6Tensor13GetTensorDescEv(void *out) { return zeroed(out, 2); }

/* A summary is there, and says of every graph that its shapes are found while it runs: of a static
   one torchair would compare the compiled shapes with its own. */
void *_ZN2ge7Session23GetCompiledGraphSummaryEj(void **out) {
    static long summary;
    out[0] = &summary;
    out[1] = 0;
    return out;
}
_Bool _ZNK2ge20CompiledGraphSummary8IsStaticEv(void *self) { return 0; }

/* torchair asks for operators that came late whether this CANN has them: a new one has all. */
_Bool _ZN2ge15OperatorFactory9IsExistOpEPKc(const char *type) { return type != 0; }
