// Makes a CPU build of torch accept the device "cuda": a device guard, streams and events that do nothing, and hooks
// that report one device. No kernel ever runs: the tensors are FakeTensors, which have a shape, a dtype and a device.
// Written for the torch of constraints.txt; torch offers no official way to do this.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto kCUDA = c10::DeviceType::CUDA;
thread_local c10::DeviceIndex current_index = 0;

c10::Device current() {
  return c10::Device(kCUDA, current_index);
}

void choose(c10::Device device) {
  current_index = device.index() < 0 ? 0 : device.index();
}

c10::Stream default_stream() {
  return c10::Stream(c10::Stream::DEFAULT, current());
}

struct Guard final : public c10::impl::NoOpDeviceGuardImpl<kCUDA> {
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = current();
    choose(device);
    return before;
  }
  c10::Device getDevice() const override { return current(); }
  void setDevice(c10::Device device) const override { choose(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { choose(device); }
  c10::Stream getStream(c10::Device) const noexcept override { return default_stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return default_stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return default_stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

struct Hooks : public at::CUDAHooksInterface {
  Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

}  // namespace

extern "C" int install_fake_cuda() {
  static Guard guard;
  c10::impl::device_guard_impl_registry[static_cast<int>(kCUDA)].store(&guard);
  // torch has built its default hooks by now and offers no setter, so that object gets our table of functions
  static Hooks hooks{at::CUDAHooksArgs{}};
  auto& existing = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(&existing) = *reinterpret_cast<void**>(&hooks);
  return at::detail::getCUDAHooks().isBuilt() ? 1 : 0;
}
