// Devices, errors, kernels, and what c10 asks the driver for.
#include "runtime.h"

#include <cuda.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <utility>

namespace emulated {

static thread_local int current = 0;
static thread_local cudaError_t last_error = cudaSuccess;
static std::atomic<unsigned> contexts{0};  // a bit for each device
size_t device_bytes();

int current_device() { return current; }
int device_count() { return (int)option("DEVICES", 1); }
void use_device() { contexts |= 1u << current; }

cudaError_t failed(cudaError_t error) { return last_error = error; }
cudaError_t refused(const char* what) {
  report(std::string("REFUSED: ") + what + " is not emulated");
  return failed(cudaErrorNotSupported);
}

}  // namespace emulated

using namespace emulated;

EXPORTED unsigned emulated_cuda_contexts() { return contexts; }

EXPORTED cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return *count > 0 ? cudaSuccess : failed(cudaErrorNoDevice);
}
EXPORTED cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return failed(cudaErrorInvalidDevice);
  current = device;
  if (!watches_nccl()) use_device();  // as since CUDA 12; torch's own threads are no matter of who uses torch
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
EXPORTED cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) {  // of an H100
  memset(found, 0, sizeof *found);
  strcpy(found->name, "Emulated H100");
  found->totalGlobalMem = device_bytes();
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = 232448;
  found->sharedMemPerMultiprocessor = 233472;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->warpSize = 32;
  found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->major = 9;
  found->multiProcessorCount = 132;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxBlocksPerMultiProcessor = 32;
  found->l2CacheSize = 52428800;
  found->memoryBusWidth = 5120;
  found->unifiedAddressing = found->concurrentKernels = found->canMapHostMemory = 1;
  found->asyncEngineCount = 3;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const std::unordered_map<int, int> known = {{cudaDevAttrComputeCapabilityMajor, 9},
                                                     {cudaDevAttrMultiProcessorCount, 132},
                                                     {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
                                                     {cudaDevAttrWarpSize, 32}};
  auto found = known.find(attribute);
  *value = found == known.end() ? 0 : found->second;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
EXPORTED cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                              cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                              const cudaGraphEdgeData** edges, size_t* count) {
  *status = cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = 0;
  if (graph != nullptr) *graph = nullptr;
  if (nodes != nullptr) *nodes = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

EXPORTED cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
EXPORTED cudaError_t cudaPeekAtLastError() { return last_error; }
EXPORTED const char* cudaGetErrorName(cudaError_t error) {
  if (error == cudaErrorMemoryAllocation) return "out of memory";
  return forever("CUDA error " + std::to_string((int)error) + " of the emulated device");
}
EXPORTED const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

// Kernels are known by name. None runs but torch's busy-wait, which sleeps: two cycles a nanosecond, in slow motion too.
static std::unordered_map<const void*, std::string>& kernels() {
  static auto* names = new std::unordered_map<const void*, std::string>;
  return *names;
}
struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
static thread_local std::vector<Configuration> configurations;

EXPORTED void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
EXPORTED void __cudaRegisterFatBinaryEnd(void**) {}
EXPORTED void __cudaUnregisterFatBinary(void**) {}
EXPORTED void __cudaRegisterFunction(void**, const char* on_host, char*, const char* name, int, void*, void*, void*,
                                     void*, int*) {
  kernels()[on_host] = name;
}
EXPORTED void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORTED unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
EXPORTED cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  auto last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *(cudaStream_t*)stream = last.stream;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  auto found = kernels().find(kernel);
  std::string name = found == kernels().end() ? "a kernel without a name" : found->second;
  if (name.find("spin_kernel") == std::string::npos) return refused(forever("kernel " + name));
  auto cycles = *(int64_t*)arguments[0];
  auto sleep = [=] { usleep((useconds_t)(cycles / 2000)); };
  enqueue(stream, timed() ? std::function<void()>([] {}) : sleep, {}, "a busy-wait", (double)cycles / 2);
  return cudaSuccess;
}
EXPORTED cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                                        cudaStream_t stream) {
  return cudaLaunchKernel((const void*)kernel, grid, block, arguments, shared, stream);
}
EXPORTED cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) {
  return cudaLaunchKernel(kernel, {}, {}, nullptr, 0, nullptr);
}
EXPORTED cudaError_t __cudaGetKernel(cudaKernel_t* found, const void* on_host) {
  *found = (cudaKernel_t)on_host;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->binaryVersion = found->ptxVersion = 90;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t,
                                                                            unsigned) {
  *count = 1;
  return cudaSuccess;
}

static CUresult driver_context_state(CUdevice device, unsigned* flags, int* active) {
  if (flags != nullptr) *flags = 0;
  if (active != nullptr) *active = contexts >> device & 1;
  return CUDA_SUCCESS;
}
static CUresult driver_current_context(CUcontext* context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}
static CUresult driver_yes() { return CUDA_SUCCESS; }
static CUresult driver_no() { return CUDA_ERROR_NOT_SUPPORTED; }

EXPORTED cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long,
                                                      cudaDriverEntryPointQueryResult* result) {
  std::string asked = name;
  *found = asked == "cuDevicePrimaryCtxGetState" ? (void*)driver_context_state
           : asked == "cuCtxGetCurrent"          ? (void*)driver_current_context
           : asked == "cuCtxSetCurrent"          ? (void*)driver_yes
                                                 : (void*)driver_no;
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
