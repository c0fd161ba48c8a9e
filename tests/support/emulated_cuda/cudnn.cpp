// What torch asks of cuDNN before it runs a recurrent layer, whose op is emulated (ops_rnn.cpp): how large the buffer of
// its weights has to be. Larger than any: torch then takes the weights one by one.
#include <cstddef>

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define CREATED(name)               \
  EXPORTED int name(void** made) {  \
    *made = (void*)1;               \
    return 0;                       \
  }
#define DONE(name) \
  EXPORTED int name() { return 0; }

CREATED(cudnnCreate)
CREATED(cudnnCreateDropoutDescriptor)
CREATED(cudnnCreateRNNDescriptor)
CREATED(cudnnCreateTensorDescriptor)
DONE(cudnnDestroyDropoutDescriptor)
DONE(cudnnDestroyRNNDescriptor)
DONE(cudnnDestroyTensorDescriptor)
DONE(cudnnSetDropoutDescriptor)
DONE(cudnnSetRNNDescriptor_v8)
DONE(cudnnSetStream)
DONE(cudnnSetTensorNdDescriptor)

EXPORTED int cudnnGetRNNWeightSpaceSize(void*, void*, size_t* bytes) {
  *bytes = size_t(1) << 50;
  return 0;
}
