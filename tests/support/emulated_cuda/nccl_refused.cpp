// Entry points of NCCL that nothing here needs: windows, devices' own communicators, registered memory. Each is refused
// by its name.
#include "emulated.h"

#define REFUSED(name)                                                      \
  EXPORTED int name() {                                                    \
    emulated::report(std::string("REFUSED: ") + #name + " is not emulated"); \
    return 3;                                                              \
  }

REFUSED(ncclCommDeregister)
REFUSED(ncclCommInitAll)
REFUSED(ncclCommMemStats)
REFUSED(ncclCommRegister)
REFUSED(ncclCommResume)
REFUSED(ncclCommShrink)
REFUSED(ncclCommSuspend)
REFUSED(ncclCommWindowDeregister)
REFUSED(ncclCommWindowRegister)
REFUSED(ncclDevCommCreate)
REFUSED(ncclDevCommDestroy)
REFUSED(ncclGetLsaMultimemDevicePointer)
REFUSED(ncclGetPeerDevicePointer)
REFUSED(ncclGroupSimulateEnd)
REFUSED(ncclMemAlloc)
REFUSED(ncclMemFree)
REFUSED(ncclPutSignal)
REFUSED(ncclRedOpCreatePreMulSum)
REFUSED(ncclRedOpDestroy)
REFUSED(ncclSignal)
REFUSED(ncclWaitSignal)
