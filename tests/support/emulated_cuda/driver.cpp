// A stand-in for libcuda.so.1, which torch, Triton and Inductor's launchers load. Nothing that they load is run.
#include <cstdio>
#include <cstring>
#include <map>

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define DONE(name) EXPORTED int name() { return 0; }
#define REFUSED(name)                                            \
  EXPORTED int name() {                                          \
    fprintf(stderr, "[emulated CUDA] %s is not emulated\n", #name); \
    return 801;                                                  \
  }

EXPORTED int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
EXPORTED int cuDeviceGet(int* device, int number) {
  *device = number;
  return 0;
}
EXPORTED int cuDeviceGetAttribute(int* value, int attribute, int) {  // of an H100
  static const std::map<int, int> known = {{10, 32},      {13, 1980000}, {16, 132}, {36, 2619000},
                                           {37, 5120},    {75, 9},       {82, 65536}, {97, 232448}};
  auto found = known.find(attribute);
  *value = found == known.end() ? 0 : found->second;
  return 0;
}
EXPORTED int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  if (flags != nullptr) *flags = 0;
  if (active != nullptr) *active = 1;
  return 0;
}
EXPORTED int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = (void*)1;
  return 0;
}
EXPORTED int cuCtxGetCurrent(void** context) { return cuDevicePrimaryCtxRetain(context, 0); }
EXPORTED int cuPointerGetAttribute(void** value, int, unsigned long long pointer) {
  *value = (void*)pointer;
  return 0;
}
EXPORTED int cuGetErrorString(int, const char** text) {
  *text = "an error of the emulated driver";
  return 0;
}
EXPORTED int cuModuleLoad(void** module, const char*) {
  *module = (void*)8;
  return 0;
}
EXPORTED int cuModuleLoadData(void** module, const void*) { return cuModuleLoad(module, nullptr); }
EXPORTED int cuModuleGetFunction(void** function, void*, const char* name) {
  *function = strdup(name);
  return 0;
}
EXPORTED int cuFuncGetAttribute(int* value, int attribute, void*) {
  *value = attribute == 4 ? 32 : attribute == 0 ? 1024 : 0;
  return 0;
}

DONE(cuInit)
DONE(cuCtxSetCurrent)
DONE(cuFuncSetAttribute)
DONE(cuFuncSetCacheConfig)
DONE(cuModuleUnload)
REFUSED(cuLaunchKernel)
REFUSED(cuLaunchKernelEx)
REFUSED(cuCtxGetDevice)
REFUSED(cuCtxGetLimit)
REFUSED(cuCtxSetLimit)
EXPORTED int cuGetProcAddress_v2() { return 801; }  // cuDNN asks when it is loaded, and does without
REFUSED(cuLaunchCooperativeKernel)
REFUSED(cuLinkAddData_v2)
REFUSED(cuLinkComplete)
REFUSED(cuLinkCreate_v2)
REFUSED(cuModuleLoadDataEx)
REFUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
REFUSED(cuOccupancyMaxActiveClusters)
REFUSED(cuTensorMapEncodeIm2col)
REFUSED(cuTensorMapEncodeTiled)
