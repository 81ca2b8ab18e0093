/* What the host code of an operator puts its arguments into; libopapi.so's operators are generated,
   do nothing, and leave the memory of their outputs as it was. */

static char object[64];

void *aclCreateTensor(void) { return object; }
void *aclCreateScalar(void) { return object; }
void *aclCreateIntArray(void) { return object; }
void *aclCreateFloatArray(void) { return object; }
void *aclCreateBoolArray(void) { return object; }
void *aclCreateTensorList(void) { return object; }
void *aclCreateScalarList(void) { return object; }
int aclDestroyTensor(void) { return 0; }
int aclDestroyScalar(void) { return 0; }
int aclDestroyIntArray(void) { return 0; }
int aclDestroyFloatArray(void) { return 0; }
int aclDestroyBoolArray(void) { return 0; }
int aclDestroyTensorList(void) { return 0; }
int aclDestroyScalarList(void) { return 0; }
int aclDestroyAclOpExecutor(void) { return 0; }
