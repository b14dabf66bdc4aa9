// A CUDA device for a PyTorch that was built without one: it has a name, an index and a stream, and computes nothing.
// PyTorch's fake tensors need no more, autograd included. Loaded before torch asks for its CUDA hooks, once a process.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
constexpr auto kCuda = c10::DeviceType::CUDA;
const Device kFirst(kCuda, 0);

struct Guard : c10::impl::NoOpDeviceGuardImpl<kCuda> {
  Device exchangeDevice(Device) const override { return kFirst; }
  Device getDevice() const override { return kFirst; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, kFirst); }
  Stream getNewStream(Device, int = 0) const override { return Stream(Stream::DEFAULT, kFirst); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, kFirst); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}  // namespace

namespace at {
struct CUDAHooks : CUDAHooksInterface {  // the registry looks for this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
