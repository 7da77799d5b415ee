// The answers that PyTorch's autograd needs from CUDA, for fake tensors: one device, one stream,
// and no work that could be waited for.  `install` registers both classes; call it before anything
// asks for CUDA.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <memory>

namespace {

constexpr c10::DeviceType kCuda = c10::DeviceType::CUDA;

c10::Device the_device() { return c10::Device(kCuda, 0); }
c10::Stream the_stream() { return c10::Stream(c10::Stream::DEFAULT, the_device()); }

struct OneDevice final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCuda; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Device getDevice() const override { return the_device(); }
  c10::Device exchangeDevice(c10::Device) const override { return the_device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}

  c10::Stream getStream(c10::Device) const override { return the_stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return the_stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return the_stream(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return the_stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return the_stream(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  void record(void**, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

struct OneDeviceHooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

OneDevice guard;

std::unique_ptr<at::CUDAHooksInterface> make_hooks(at::CUDAHooksArgs) {
  return std::make_unique<OneDeviceHooks>();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void install() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(kCuda)].store(&guard);
  at::CUDAHooksRegistry()->Register("CUDAHooks", make_hooks, c10::REGISTRY_PREFERRED);
}
