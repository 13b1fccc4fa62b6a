// A CUDA runtime, driver, cuBLAS and NCCL with one sm_90 device that computes nothing: device memory is host memory
// that is taken where it is written, small copies are done at once, kernels and collectives are noted with their stream
// and not run. What hardware refuses is refused: launches and tensor maps out of their limits, collectives on host
// memory, waiting for a stream that is captured. library.py builds it, and adds the symbols that nobody here needs.
#define __CUDA_API_VERSION_INTERNAL 1
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <nccl.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "ranks.hpp"
#define API extern "C" __attribute__((visibility("default")))

namespace {
std::recursive_mutex lock;
typedef std::lock_guard<std::recursive_mutex> Guard;

struct Access {
  unsigned long long ptr, bytes;
  int write;
};
struct Op {
  int kind;
  int stream;
  const char* name;
  long long a, b;
  std::vector<Access> touches;
  std::vector<unsigned> clock;
  int capturing;
};
enum {
  KERNEL = 0,
  TRITON = 1,
  GEMM = 2,
  NCCL_OP = 3,
  COPY = 4,
  SET = 5,
  RECORD = 6,
  WAIT = 7,
  SYNC = 8,
  MALLOC = 9,
  FREE = 10,
  HOST_ALLOC = 11,
  GRAPH = 12,
  MODULE = 13
};
std::vector<Op> ops;
std::set<std::string> names;
const char* intern(const std::string& s) { return names.insert(s).first->c_str(); }
typedef void (*Callback)(int kind, const char* name, int stream, long long bytes);
Callback callback = nullptr;
bool logging = true;
int no_wait = -1;  // a stream whose waits do nothing: a mistake that must be found

// --- streams and events: vector clocks
struct Stream {
  int id;
  int priority;
  unsigned flags;
  bool capturing;
  std::vector<unsigned> clock;
  int capture_id;
  ranks::Needs needs;  // collectives that other ranks have not all asked for
  int last;            // kind of what it was asked last, records apart
};
struct Event {
  std::vector<unsigned> clock;
  bool recorded;
  ranks::Needs needs;
  bool of_collective;  // that nothing followed on its stream
  std::chrono::steady_clock::time_point when;
};
std::vector<Stream*> streams;
Stream* default_stream() {
  if (streams.empty()) streams.push_back(new Stream{0, 0, 0, false, {}, 0, {}});
  return streams[0];
}
Stream* of(void* s) {
  default_stream();
  if (s == nullptr || (size_t)s <= 2) return streams[0];
  return (Stream*)s;
}
ranks::Needs needs_of(void* stream) {
  Guard g(lock);
  return of(stream)->needs;
}
std::vector<unsigned> host_clock;  // what the host knows to be done
void merge(std::vector<unsigned>& into, const std::vector<unsigned>& from) {
  if (into.size() < from.size()) into.resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); i++)
    if (into[i] < from[i]) into[i] = from[i];
}
// With REHEARSE_DEVICE=1 this process has the second of two devices, as another rank of a node has: all that is asked of
// the first one is then a mistake, of a thread that has chosen none.
const int own_device = getenv("REHEARSE_DEVICE") ? atoi(getenv("REHEARSE_DEVICE")) : 0;
thread_local int current_device = 0;
std::atomic<long long> noted_on[8];
Op& note(int kind, void* s, const char* name, long long a = 0, long long b = 0) {
  noted_on[current_device]++;
  Stream* stream = of(s);
  if ((int)stream->clock.size() <= stream->id) stream->clock.resize(stream->id + 1, 0);
  merge(stream->clock, host_clock);
  stream->clock[stream->id]++;
  if (kind != RECORD) stream->last = kind;
  static Op scrap;
  if (!logging) {
    scrap = Op();
    return scrap;
  }
  ops.push_back(Op{kind, stream->id, name, a, b, {}, stream->clock, stream->capturing});
  return ops.back();
}
int capture_count = 0, captures_open = 0;
thread_local int capture_mode = 0;
cudaError_t sync(const char* name, void* s, long long bytes = 0) {
  ranks::await(needs_of(s));
  Guard g(lock);
  if (captures_open && (of(s)->capturing || !strcmp(name, "cudaDeviceSynchronize"))) {
    fprintf(stderr, "rehearse: %s during capture\n", name);
    return cudaErrorStreamCaptureUnsupported;
  }
  note(SYNC, s, name, bytes);
  return cudaSuccess;
}
void tell(const char* name, void* s, long long bytes) {
  if (callback) callback(SYNC, name, of(s)->id, bytes);
}

// --- memory
std::map<unsigned long long, size_t> device_blocks, host_blocks;
size_t in_use = 0, peak = 0;
const size_t TOTAL = 80ull << 30;
bool in(const std::map<unsigned long long, size_t>& m, unsigned long long p) {
  auto it = m.upper_bound(p);
  if (it == m.begin()) return false;
  --it;
  return p < it->first + it->second;
}
bool on_device(const void* p) { return in(device_blocks, (unsigned long long)p); }
cudaError_t device_alloc(void** p, size_t n) {
  Guard g(lock);
  if (in_use + n > TOTAL) {
    *p = nullptr;
    return cudaErrorMemoryAllocation;
  }
  // Pages that nobody writes take no memory here: a model of billions fits.
  char* found =
      (char*)mmap(nullptr, n + (4 << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return cudaErrorMemoryAllocation;
  *p = (void*)(((unsigned long long)found + (2 << 20) - 1) / (2 << 20) * (2 << 20));
  device_blocks[(unsigned long long)*p] = n;
  in_use += n;
  if (in_use > peak) peak = in_use;
  note(MALLOC, nullptr, "cudaMalloc", n);
  return cudaSuccess;
}

// --- kernels
struct Kernel {
  const char* name;
  int params;
  std::vector<int> sizes;
};
std::unordered_map<const void*, Kernel*> kernels;  // by host function or CUfunction
Kernel* kernel_of(const void* f) {
  auto it = kernels.find(f);
  if (it != kernels.end()) return it->second;
  if (f)
    for (auto& k : kernels)
      if (k.second == f) return k.second;
  return nullptr;
}
const char* name_of(const void* f) {
  Kernel* k = kernel_of(f);
  return k ? k->name : "?";
}

struct Module {
  std::map<std::string, Kernel*> functions;
};
template <class T>
T at(const char* p, size_t o) {
  T v;
  memcpy(&v, p + o, sizeof v);
  return v;
}
// The parameters of a cubin's kernel: EIATTR_KPARAM_INFO (0x17) in .nv.info.NAME.
Module* parse(const char* elf) {
  Module* m = new Module;
  if (memcmp(elf, "\177ELF", 4)) return m;
  size_t shoff = at<uint64_t>(elf, 0x28);
  int shentsize = at<uint16_t>(elf, 0x3a), shnum = at<uint16_t>(elf, 0x3c), shstrndx = at<uint16_t>(elf, 0x3e);
  auto header = [&](int i) { return elf + shoff + (size_t)i * shentsize; };
  const char* strings = elf + at<uint64_t>(header(shstrndx), 0x18);
  for (int i = 0; i < shnum; i++) {
    std::string name = strings + at<uint32_t>(header(i), 0);
    if (name.rfind(".nv.info.", 0)) continue;
    const char* p = elf + at<uint64_t>(header(i), 0x18);
    size_t n = at<uint64_t>(header(i), 0x20);
    Kernel* k = new Kernel{intern(name.substr(9)), 0, {}};
    for (size_t o = 0; o + 4 <= n;) {
      int format = (unsigned char)p[o], attribute = (unsigned char)p[o + 1], size = at<uint16_t>(p, o + 2);
      if (format == 4) {
        if (attribute == 0x17) {
          int ordinal = at<uint16_t>(p, o + 8);
          uint32_t word = at<uint32_t>(p, o + 12);
          if ((int)k->sizes.size() <= ordinal) k->sizes.resize(ordinal + 1, 0);
          k->sizes[ordinal] = (word >> 18) & 0x3fff;
        }
        o += 4 + size;
      } else
        o += 4;
    }
    k->params = k->sizes.size();
    m->functions[name.substr(9)] = k;
  }
  return m;
}
// Memory that work on streams shares: the device's, and what is pinned for it.
bool known(unsigned long long p) { return in(device_blocks, p) || in(host_blocks, p); }
void touch_params(Op& op, Kernel* k, void** args) {
  if (!k || !args) return;
  for (int i = 0; i < k->params; i++) {
    if (!args[i]) continue;
    for (int o = 0; o + 8 <= k->sizes[i]; o += 8) {
      unsigned long long v;
      memcpy(&v, (char*)args[i] + o, 8);
      if (known(v)) op.touches.push_back({v, 1, -1});
      if (k->sizes[i] == 128) break;  // a tensor map: our own, whose first word is the address
    }
  }
}
cudaError_t launch(const void* f, dim3 g, dim3 b, void** args, size_t shared, cudaStream_t s) {
  Guard guard(lock);
  if ((size_t)g.x * g.y * g.z == 0 || g.y > 65535 || g.z > 65535 || b.x * b.y * b.z > 1024 || shared > 227 * 1024) {
    fprintf(stderr, "rehearse: bad launch %s grid %u %u %u block %u %u %u shared %zu\n", name_of(f), g.x, g.y, g.z, b.x,
            b.y, b.z, shared);
    return cudaErrorInvalidConfiguration;
  }
  note(KERNEL, s, name_of(f), (long long)g.x * g.y * g.z, shared);
  return cudaSuccess;
}
cudaError_t last = cudaSuccess;
}  // namespace

// ------------------------------------------------------------------------------------------ for device.py
struct FgOp {
  int kind, stream;
  const char* name;
  long long a, b;
  int touches, capturing;
};
API int fg_count() {
  Guard g(lock);
  return ops.size();
}
API void fg_clear() {
  Guard g(lock);
  ops.clear();
}
API void fg_logging(int on) {
  Guard g(lock);
  logging = on;
}
API void fg_get(int i, FgOp* out) {
  Guard g(lock);
  Op& o = ops[i];
  *out = {o.kind, o.stream, o.name, o.a, o.b, (int)o.touches.size(), o.capturing};
}
API void fg_touch(int i, int k, Access* out) {
  Guard g(lock);
  *out = ops[i].touches[k];
}
API void fg_note_touch(const char* name, void* stream, int n, Access* touches) {
  Guard g(lock);
  Op& o = note(KERNEL, stream, intern(name));
  for (int i = 0; i < n; i++) o.touches.push_back(touches[i]);
}
API void fg_no_wait(int stream) {
  Guard g(lock);
  no_wait = stream;
}
API void fg_callback(Callback c) { callback = c; }
API size_t fg_peak() { return peak; }
API int fg_streams() { return streams.size(); }
API int fg_clock(int i, unsigned* out, int room) {
  Guard g(lock);
  auto& clock = ops[i].clock;
  int n = (int)clock.size();
  for (int k = 0; k < n && k < room; k++) out[k] = clock[k];
  return n;
}

// ------------------------------------------------------------------------------------------ runtime
API long long fg_noted_on(int device) { return noted_on[device]; }
API cudaError_t cudaGetDeviceCount(int* n) {
  *n = own_device + 1;
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* d) {
  *d = current_device;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int d) {
  if (d < 0 || d > own_device) return cudaErrorInvalidDevice;
  current_device = d;
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
API cudaError_t cudaGetLastError() {
  auto e = last;
  last = cudaSuccess;
  return e;
}
API cudaError_t cudaPeekAtLastError() { return last; }
API const char* cudaGetErrorString(cudaError_t e) {
  static char s[64];
  snprintf(s, 64, "rehearse error %d", (int)e);
  return s;
}
API const char* cudaGetErrorName(cudaError_t e) { return cudaGetErrorString(e); }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  // Inductor's cache is by the device's name: what is compiled for a card that will be there is found by it.
  const char* name = getenv("REHEARSE_CARD");
  snprintf(p->name, sizeof p->name, "%s", name ? name : "NVIDIA H100 80GB HBM3 (none)");
  p->totalGlobalMem = TOTAL;
  p->sharedMemPerBlock = 48 << 10;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->memPitch = 1 << 30;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = 9;
  p->minor = 0;
  p->textureAlignment = 512;
  p->multiProcessorCount = 132;
  p->canMapHostMemory = 1;
  p->concurrentKernels = 1;
  p->asyncEngineCount = 3;
  p->unifiedAddressing = 1;
  p->memoryBusWidth = 5120;
  p->l2CacheSize = 50 << 20;
  p->maxThreadsPerMultiProcessor = 2048;
  p->streamPrioritiesSupported = 1;
  p->sharedMemPerMultiprocessor = 228 << 10;
  p->regsPerMultiprocessor = 65536;
  p->managedMemory = 1;
  p->cooperativeLaunch = 1;
  p->sharedMemPerBlockOptin = 227 << 10;
  p->maxBlocksPerMultiProcessor = 32;
  p->reservedSharedMemPerBlock = 1024;
  p->memoryPoolsSupported = 1;
  p->clusterLaunch = 1;
  p->pciBusID = 1;
  return cudaSuccess;
}
static int attribute(int a) {
  switch (a) {
    case cudaDevAttrMaxThreadsPerBlock:
      return 1024;
    case cudaDevAttrMaxBlockDimX:
      return 1024;
    case cudaDevAttrMaxBlockDimY:
      return 1024;
    case cudaDevAttrMaxBlockDimZ:
      return 64;
    case cudaDevAttrMaxGridDimX:
      return 2147483647;
    case cudaDevAttrMaxGridDimY:
      return 65535;
    case cudaDevAttrMaxGridDimZ:
      return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return 48 << 10;
    case cudaDevAttrWarpSize:
      return 32;
    case cudaDevAttrMaxRegistersPerBlock:
      return 65536;
    case cudaDevAttrClockRate:
      return 1980000;
    case cudaDevAttrMultiProcessorCount:
      return 132;
    case cudaDevAttrMemoryClockRate:
      return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth:
      return 5120;
    case cudaDevAttrL2CacheSize:
      return 50 << 20;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return 2048;
    case cudaDevAttrUnifiedAddressing:
      return 1;
    case cudaDevAttrComputeCapabilityMajor:
      return 9;
    case cudaDevAttrComputeCapabilityMinor:
      return 0;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return 228 << 10;
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      return 65536;
    case cudaDevAttrCooperativeLaunch:
      return 1;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return 227 << 10;
    case cudaDevAttrStreamPrioritiesSupported:
      return 1;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      return 32;
    case cudaDevAttrMemoryPoolsSupported:
      return 1;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      return 1024;
    default:
      return 0;
  }
}
API cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
  *v = attribute(a);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* s, int n, int) {
  snprintf(s, n, "0000:01:00.0");
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* v, int, int) {
  *v = 0;
  return cudaSuccess;
}
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaDeviceSynchronize() {
  for (size_t i = 0; i < streams.size(); i++) ranks::await(needs_of(streams[i]));
  auto e = sync("cudaDeviceSynchronize", nullptr);
  tell("cudaDeviceSynchronize", nullptr, 0);
  Guard g(lock);
  for (auto s : streams) merge(host_clock, s->clock);
  return e;
}
API cudaError_t cudaMemGetInfo(size_t* f, size_t* t) {
  *f = TOTAL - in_use;
  *t = TOTAL;
  return cudaSuccess;
}

API cudaError_t cudaMalloc(void** p, size_t n) { return device_alloc(p, n); }
API cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) { return device_alloc(p, n); }
API cudaError_t cudaFree(void* p) {
  Guard g(lock);
  auto it = device_blocks.find((unsigned long long)p);
  if (it != device_blocks.end()) {
    size_t it_size = it->second;
    in_use -= it->second;
    note(FREE, nullptr, "cudaFree", it->second);
    device_blocks.erase(it);
    madvise(p, it_size, MADV_DONTNEED);
  }
  return cudaSuccess;
}
API cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
API cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
  Guard g(lock);
  if (posix_memalign(p, 4096, n ? n : 1)) return cudaErrorMemoryAllocation;
  memset(*p, 0, n);
  host_blocks[(unsigned long long)*p] = n;
  note(HOST_ALLOC, nullptr, "cudaHostAlloc", n);
  return cudaSuccess;
}
API cudaError_t cudaFreeHost(void* p) {
  Guard g(lock);
  host_blocks.erase((unsigned long long)p);
  free(p);
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void* p, size_t n, unsigned) {
  Guard g(lock);
  host_blocks[(unsigned long long)p] = n;
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* p) {
  Guard g(lock);
  host_blocks.erase((unsigned long long)p);
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  Guard g(lock);
  memset(a, 0, sizeof *a);
  a->devicePointer = a->hostPointer = (void*)p;
  a->type = on_device(p)                             ? cudaMemoryTypeDevice
            : in(host_blocks, (unsigned long long)p) ? cudaMemoryTypeHost
                                                     : cudaMemoryTypeUnregistered;
  a->device = a->type == cudaMemoryTypeUnregistered ? -2 : own_device;
  return cudaSuccess;
}
const size_t SMALL = 1 << 16;  // what is larger than this and stays on the device nobody reads
static void copied(void* d, const void* s, size_t n, cudaStream_t st, const char* name) {
  if (n <= SMALL || !(on_device(d) && on_device(s))) memmove(d, s, n);
  Op& o = note(COPY, st, name, n);
  if (known((unsigned long long)d)) o.touches.push_back({(unsigned long long)d, n, 1});
  if (known((unsigned long long)s)) o.touches.push_back({(unsigned long long)s, n, 0});
}
API cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind, cudaStream_t st) {
  const char* name;
  bool waits = false;
  ranks::await(needs_of(st));  // what was gathered is copied at once
  {
    Guard g(lock);
    bool dd = on_device(d), sd = on_device(s), pinned = in(host_blocks, (unsigned long long)(dd ? s : d));
    name = dd && sd ? "copy D2D"
           : dd     ? (pinned ? "copy H2D pinned" : "copy H2D pageable")
                    : (pinned ? "copy D2H pinned" : "copy D2H pageable");
    waits = !dd && sd && !pinned;
    if (of(st)->capturing && !pinned && !(dd && sd)) {
      fprintf(stderr, "rehearse: %s during capture\n", name);
      return cudaErrorStreamCaptureUnsupported;
    }
    copied(d, s, n, st, name);
  }
  if (waits) tell(name, st, n);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind k) {
  auto e = cudaMemcpyAsync(d, s, n, k, nullptr);
  sync("cudaMemcpy", nullptr, n);
  tell("cudaMemcpy", nullptr, n);
  return e;
}
API cudaError_t cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t st) {
  return cudaMemcpyAsync(d, s, n, cudaMemcpyDefault, st);
}
API cudaError_t cudaMemcpy2DAsync(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, cudaMemcpyKind,
                                  cudaStream_t st) {
  Guard g(lock);
  for (size_t i = 0; i < h; i++) memmove((char*)d + i * dp, (char*)s + i * sp, w);
  note(COPY, st, "copy 2D", w * h);
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* d, int v, size_t n) {
  memset(d, v, n);
  return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void* d, int v, size_t n, cudaStream_t st) {
  Guard g(lock);
  if (n <= SMALL) memset(d, v, n);
  Op& o = note(SET, st, "memset", n);
  o.touches.push_back({(unsigned long long)d, n, 1});
  return cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
API cudaError_t cudaGetSymbolAddress(void** p, const void*) {
  static char some[1 << 16];
  *p = some;
  return cudaSuccess;
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned f, int p) {
  Guard g(lock);
  default_stream();
  auto n = new Stream{(int)streams.size(), p, f, false, {}, 0, {}};
  streams.push_back(n);
  *s = (cudaStream_t)n;
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned f) { return cudaStreamCreateWithPriority(s, f, 0); }
API cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int* p) {
  *p = of(s)->priority;
  return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  auto e = sync("cudaStreamSynchronize", s);
  tell("cudaStreamSynchronize", s, 0);
  Guard g(lock);
  merge(host_clock, of(s)->clock);
  return e;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  Guard g(lock);
  note(WAIT, s, "wait");
  if (no_wait == of(s)->id) return cudaSuccess;
  auto event = (Event*)e;
  merge(of(s)->clock, event->clock);
  ranks::need(of(s)->needs, event->needs);
  if (logging && !ops.empty()) ops.back().clock = of(s)->clock;
  return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* u, unsigned) {
  f(s, cudaSuccess, u);
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t f, void* u) {
  f(u);
  return cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
  *e = (cudaEvent_t) new Event{{}, false, {}};
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  Guard g(lock);
  note(RECORD, s, "record");
  auto event = (Event*)e;
  event->clock = of(s)->clock;
  event->needs = of(s)->needs;
  event->recorded = true;
  event->of_collective = of(s)->last == NCCL_OP;
  event->when = std::chrono::steady_clock::now();
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
static ranks::Needs needs_of_event(cudaEvent_t e) {
  Guard g(lock);
  return ((Event*)e)->needs;
}
// Whether one rank alone finds an event done. All are at once but those of collectives, which take until the host has
// waited for them, or for what follows them, or SLOW. Were they done at once, too, PyTorch's watchdog would find them
// so before a stream waits for them, and ProcessGroupNCCL2 (torch 2.15) makes no stream wait for what is done.
const auto SLOW = std::chrono::seconds(10);
static bool found_done(cudaEvent_t e) {
  Guard g(lock);
  auto event = (Event*)e;
  if (!event->of_collective || std::chrono::steady_clock::now() - event->when > SLOW) return true;
  for (size_t i = 0; i < event->clock.size(); i++)
    if (event->clock[i] > (i < host_clock.size() ? host_clock[i] : 0)) return false;
  return true;
}
API cudaError_t cudaEventQuery(cudaEvent_t e) {
  bool done = ranks::folder() ? ranks::done(needs_of_event(e)) : found_done(e);
  return last = done ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  ranks::await(needs_of_event(e));
  auto r = sync("cudaEventSynchronize", nullptr);
  tell("cudaEventSynchronize", nullptr, 0);
  Guard g(lock);
  merge(host_clock, ((Event*)e)->clock);
  return r;
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
  *ms = 1.0f;
  return cudaSuccess;
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* m) {
  auto old = capture_mode;
  capture_mode = *m;
  *m = (cudaStreamCaptureMode)old;
  return cudaSuccess;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
  Guard g(lock);
  of(s)->capturing = true;
  of(s)->capture_id = ++capture_count;
  captures_open++;
  note(GRAPH, s, "begin capture");
  return cudaSuccess;
}
API cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t s, cudaGraph_t, const cudaGraphNode_t*,
                                              const cudaGraphEdgeData*, size_t, cudaStreamCaptureMode m) {
  return cudaStreamBeginCapture(s, m);
}
API cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* graph) {
  Guard g(lock);
  note(GRAPH, s, "end capture");
  of(s)->capturing = false;
  captures_open--;
  *graph = (cudaGraph_t)0x10;
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* st) {
  *st = of(s)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* st, unsigned long long* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t** deps,
                                         const cudaGraphEdgeData** edges, size_t* n) {
  cudaStreamIsCapturing(s, st);
  if (id) *id = of(s)->capture_id;
  if (graph) *graph = (cudaGraph_t)0x10;
  if (deps) *deps = nullptr;
  if (edges) *edges = nullptr;
  if (n) *n = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t,
                                                    unsigned) {
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* e, cudaGraph_t, unsigned long long) {
  *e = (cudaGraphExec_t)0x11;
  return cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t s) {
  Guard g(lock);
  note(GRAPH, s, "graph launch");
  return cudaSuccess;
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* n) {
  *n = 1;
  return cudaSuccess;
}
API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* n) {
  *n = 0;
  return cudaSuccess;
}

API void** __cudaRegisterFatBinary(void*) {
  static void* h[4];
  return h;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*,
                                int*) {
  Guard g(lock);
  kernels[host] = new Kernel{name, 0, {}};
}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API char __cudaInitModule(void**) { return 1; }
API cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* f) {
  Guard g(lock);
  *k = (cudaKernel_t)kernel_of(f);
  if (!*k) *k = (cudaKernel_t)f;
  return cudaSuccess;
}
struct Call {
  dim3 g, b;
  size_t shared;
  void* stream;
};
static thread_local std::vector<Call> calls;
API unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t shared, cudaStream_t s) {
  calls.push_back({g, b, shared, s});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* shared, void* s) {
  auto c = calls.back();
  calls.pop_back();
  *g = c.g;
  *b = c.b;
  *shared = c.shared;
  *(void**)s = c.stream;
  return cudaSuccess;
}
API cudaError_t cudaLaunchKernel(const void* f, dim3 g, dim3 b, void** a, size_t shared, cudaStream_t s) {
  return launch(f, g, b, a, shared, s);
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void** a, size_t shared, cudaStream_t s) {
  Guard guard(lock);
  note(KERNEL, s, ((Kernel*)k)->name, (long long)g.x * g.y * g.z, shared);
  return cudaSuccess;
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void** a) {
  return launch(f, c->gridDim, c->blockDim, a, c->dynamicSmemBytes, c->stream);
}
API cudaError_t cudaLaunchCooperativeKernel(const void* f, dim3 g, dim3 b, void** a, size_t shared, cudaStream_t s) {
  return launch(f, g, b, a, shared, s);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->ptxVersion = a->binaryVersion = 90;
  a->maxDynamicSharedSizeBytes = 227 << 10;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) {
  *n = 2;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  *n = 2;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* p, int) {
  *p = (cudaMemPool_t)0x20;
  return cudaSuccess;
}

extern "C" int fg_ok() { return 0; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* r) {
  *f = dlsym(RTLD_DEFAULT, name);
  if (!*f) *f = (void*)fg_ok;
  if (r) *r = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ------------------------------------------------------------------------------------------ driver
API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* v) {
  *v = 13000;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGet(CUdevice* d, int ordinal) {
  *d = ordinal;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetCount(int* n) {
  *n = own_device + 1;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice) {
  *v = attribute(a);
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* c) {
  *c = (CUcontext)0x30;
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetDevice(CUdevice* d) { return cuDeviceGet(d, current_device); }
API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxGetLimit(size_t* v, CUlimit) {
  *v = 1 << 20;
  return CUDA_SUCCESS;
}
API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice) {
  *c = (CUcontext)0x30;
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned* f, int* a) {
  if (f) *f = 0;
  *a = d == own_device || noted_on[d] > 0;
  return CUDA_SUCCESS;
}
API CUresult cuGetErrorString(CUresult e, const char** s) {
  *s = "rehearse driver error";
  return CUDA_SUCCESS;
}
API CUresult cuGetErrorName(CUresult e, const char** s) {
  *s = "rehearse";
  return CUDA_SUCCESS;
}
API CUresult cuModuleLoadData(CUmodule* m, const void* image) {
  Guard g(lock);
  auto made = parse((const char*)image);
  *m = (CUmodule)made;
  if (made->functions.empty()) {
    fprintf(stderr, "rehearse: a module without kernels\n");
    return CUDA_ERROR_INVALID_IMAGE;
  }
  note(MODULE, nullptr, made->functions.begin()->second->name);
  return CUDA_SUCCESS;
}
API CUresult cuModuleLoadDataEx(CUmodule* m, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(m, image);
}
API CUresult cuModuleLoad(CUmodule* m, const char* path) {
  FILE* f = fopen(path, "rb");
  if (!f) return CUDA_ERROR_FILE_NOT_FOUND;
  fseek(f, 0, SEEK_END);
  size_t n = ftell(f);
  rewind(f);
  char* data = (char*)malloc(n);
  if (fread(data, 1, n, f) != n) return CUDA_ERROR_INVALID_IMAGE;
  fclose(f);
  auto r = cuModuleLoadData(m, data);
  free(data);
  return r;
}
API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
API CUresult cuModuleGetFunction(CUfunction* f, CUmodule m, const char* name) {
  Guard g(lock);
  auto& all = ((Module*)m)->functions;
  auto it = all.find(name);
  if (it == all.end()) {
    fprintf(stderr, "rehearse: no function %s\n", name);
    return CUDA_ERROR_NOT_FOUND;
  }
  *f = (CUfunction)it->second;
  kernels[it->second] = it->second;
  return CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int* v, CUfunction_attribute a, CUfunction) {
  *v = a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 128 : a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction, int, size_t) {
  *n = 2;
  return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveClusters(int* n, CUfunction, const CUlaunchConfig*) {
  *n = 66;
  return CUDA_SUCCESS;
}
API CUresult cuPointerGetAttribute(void* data, CUpointer_attribute a, CUdeviceptr p) {
  Guard g(lock);
  if (a == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) {
    if (!in(device_blocks, p) && !in(host_blocks, p)) return CUDA_ERROR_INVALID_VALUE;
    *(CUdeviceptr*)data = p;
    return CUDA_SUCCESS;
  }
  memset(data, 0, 4);
  return CUDA_SUCCESS;
}
static CUresult driver_launch(CUfunction f, size_t gx, size_t gy, size_t gz, size_t threads, size_t shared, void* s,
                              void** args) {
  Guard g(lock);
  Kernel* k = (Kernel*)f;
  if (gx * gy * gz == 0) return CUDA_SUCCESS;
  if (gy > 65535 || gz > 65535 || threads > 1024 || shared > 227 * 1024) {
    fprintf(stderr, "rehearse: bad launch %s grid %zu %zu %zu threads %zu shared %zu\n", k->name, gx, gy, gz, threads,
            shared);
    return CUDA_ERROR_INVALID_VALUE;
  }
  Op& o = note(TRITON, s, k->name, gx * gy * gz, shared);
  touch_params(o, k, args);
  return CUDA_SUCCESS;
}
API CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                            unsigned shared, CUstream s, void** args, void**) {
  return driver_launch(f, gx, gy, gz, bx * by * bz, shared, s, args);
}
API CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                       unsigned bz, unsigned shared, CUstream s, void** args) {
  return driver_launch(f, gx, gy, gz, bx * by * bz, shared, s, args);
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void** args, void**) {
  return driver_launch(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX * c->blockDimY * c->blockDimZ,
                       c->sharedMemBytes, c->hStream, args);
}
static long long maps = 0;
API long long fg_tensor_maps() { return maps; }
API CUresult cuTensorMapEncodeTiled(CUtensorMap* m, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                    const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                                    const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                    CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  Guard g(lock);
  maps++;
  // The limits of the CUDA driver API reference.
  bool ok = rank >= 1 && rank <= 5 && (unsigned long long)address % 16 == 0 && on_device(address);
  int size = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 || type == CU_TENSOR_MAP_DATA_TYPE_INT32 ||
                     type == CU_TENSOR_MAP_DATA_TYPE_UINT32
                 ? 4
             : type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1
                                                     : 2;
  for (unsigned i = 0; i < rank; i++)
    ok &= dims[i] >= 1 && dims[i] <= (1ull << 32) && box[i] >= 1 && box[i] <= 256 && steps[i] >= 1 && steps[i] <= 8;
  for (unsigned i = 0; i + 1 < rank; i++) ok &= strides[i] % 16 == 0 && strides[i] < (1ull << 40);
  size_t inner = (size_t)box[0] * size;
  ok &= inner % 16 == 0;
  size_t most = swizzle == CU_TENSOR_MAP_SWIZZLE_32B    ? 32
                : swizzle == CU_TENSOR_MAP_SWIZZLE_64B  ? 64
                : swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128
                                                        : (size_t)1 << 30;
  ok &= inner <= most;
  memset(m, 0, sizeof *m);
  memcpy(m, &address, 8);
  if (!ok)
    fprintf(stderr,
            "rehearse: tensor map refused: rank %u address %p dims %llu %llu %llu strides %llu %llu box %u %u %u\n",
            rank, address, (unsigned long long)dims[0], rank > 1 ? (unsigned long long)dims[1] : 0,
            rank > 2 ? (unsigned long long)dims[2] : 0, rank > 1 ? (unsigned long long)strides[0] : 0,
            rank > 2 ? (unsigned long long)strides[1] : 0, box[0], rank > 1 ? box[1] : 0, rank > 2 ? box[2] : 0);
  return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
API CUresult cuMemGetAllocationGranularity(size_t* n, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *n = 2 << 20;
  return CUDA_SUCCESS;
}

// ------------------------------------------------------------------------------------------ cuBLAS
static void* blas_stream = nullptr;
API int cublasCreate_v2(void** h) {
  *h = malloc(64);
  return 0;
}
API int cublasSetStream_v2(void*, void* s) {
  blas_stream = s;
  return 0;
}
API int cublasGetMathMode(void*, int* m) {
  *m = 0;
  return 0;
}
API int cublasGetPointerMode_v2(void*, int* m) {
  *m = 0;
  return 0;
}
API int cublasGemmEx(void*, int, int, int m, int n, int k, const void*, const void* A, int, int, const void* B, int,
                     int, const void*, void* C, ...) {
  Guard g(lock);
  Op& o = note(GEMM, blas_stream, "cublasGemmEx", 2ll * m * n * k);
  o.touches = {{(unsigned long long)A, 1, 0}, {(unsigned long long)B, 1, 0}, {(unsigned long long)C, 1, 1}};
  return 0;
}
API int cublasGemmStridedBatchedEx(void*, int, int, int m, int n, int k, ...) {
  Guard g(lock);
  note(GEMM, blas_stream, "cublasGemmStridedBatchedEx", 2ll * m * n * k);
  return 0;
}
API int cublasSgemm_v2(void*, int, int, int m, int n, int k, ...) {
  Guard g(lock);
  note(GEMM, blas_stream, "cublasSgemm", 2ll * m * n * k);
  return 0;
}
API int cublasSgemmStridedBatched(void*, int, int, int m, int n, int k, ...) {
  Guard g(lock);
  note(GEMM, blas_stream, "cublasSgemmStridedBatched", 2ll * m * n * k);
  return 0;
}
API int cublasLtCreate(void** h) {
  *h = malloc(64);
  return 0;
}
API int cublasLtMatmulDescCreate(void** d, int, int) {
  *d = malloc(256);
  return 0;
}
API int cublasLtMatrixLayoutCreate(void** d, int, unsigned long long, unsigned long long, long long) {
  *d = malloc(256);
  return 0;
}
API int cublasLtMatmulPreferenceCreate(void** d) {
  *d = malloc(256);
  return 0;
}
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results,
                                       int* found) {
  memset(results, 0, 96);
  *found = 1;
  return 0;
}
API int cublasLtMatmul(void*, void*, const void*, const void* A, void*, const void* B, void*, const void*,
                       const void* C, void*, void* D, void*, const void*, void*, size_t, void* s) {
  Guard g(lock);
  Op& o = note(GEMM, s, "cublasLtMatmul");
  o.touches = {{(unsigned long long)A, 1, 0}, {(unsigned long long)B, 1, 0}, {(unsigned long long)D, 1, 1}};
  return 0;
}
API size_t cublasLtGetVersion() { return 130101; }

// ------------------------------------------------------------------------------------------ NCCL
static int comms = 0;
static size_t width(ncclDataType_t t) {
  switch (t) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    default:
      return 8;
  }
}
static ncclResult_t noted(const char* name, const void* s, size_t sn, void* r, size_t rn, ncclComm_t c,
                          cudaStream_t st) {
  Guard g(lock);
  if ((s && sn && !on_device(s)) || (r && rn && !on_device(r))) {
    fprintf(stderr, "rehearse: %s of memory that is not the device's\n", name);
    return ncclInvalidArgument;
  }
  Op& o = note(NCCL_OP, st, name, sn, c->size);
  if (sn) o.touches.push_back({(unsigned long long)s, sn, 0});
  if (rn) o.touches.push_back({(unsigned long long)r, rn, 1});
  return ncclSuccess;
}
static void asked(ranks::Needs needs, cudaStream_t st) {
  Guard g(lock);
  ranks::need(of(st)->needs, needs);
}
static ncclResult_t collective(const char* name, const void* s, size_t sn, void* r, size_t rn, ncclComm_t c,
                               cudaStream_t st, ncclDataType_t type = ncclInt8, ncclRedOp_t op = ncclSum,
                               int root = 0) {
  ncclResult_t found = noted(name, s, sn, r, rn, c, st);
  if (found != ncclSuccess || c->key.empty()) return found;
  asked(ranks::post(c, {name, (const char*)s, (char*)r, sn, rn, type, op, root}), st);
  return ncclSuccess;
}
API ncclResult_t ncclGetVersion(int* v) {
  *v = NCCL_VERSION_CODE;
  return ncclSuccess;
}
API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 7, sizeof *id);
  if (ranks::folder()) {
    static int made = 0;
    snprintf(id->internal, sizeof id->internal, "%d-%d", (int)getpid(), made++);
  }
  return ncclSuccess;
}
// NCCL allocates and waits there, which a stream that is captured does not take.
static bool within_capture() {
  if (captures_open) fprintf(stderr, "rehearse: a communicator is made during capture\n");
  return captures_open;
}
API ncclResult_t ncclCommInitRankConfig(ncclComm_t* c, int n, ncclUniqueId id, int rank, ncclConfig_t*) {
  if (within_capture()) return ncclInvalidUsage;
  *c = new ncclComm{rank, n, comms++};
  if (ranks::folder()) {
    (*c)->key = id.internal;
    ranks::join(*c);
  }
  return ncclSuccess;
}
API ncclResult_t ncclCommInitRank(ncclComm_t* c, int n, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(c, n, id, rank, nullptr);
}
API ncclResult_t ncclCommInitRankScalable(ncclComm_t* c, int n, int rank, int, ncclUniqueId* id, ncclConfig_t* k) {
  return ncclCommInitRankConfig(c, n, *id, rank, k);
}
static int split_size = 0, split_rank = 0;  // of the group being made: what others would say
API void fg_split(int size, int rank) {
  split_size = size;
  split_rank = rank;
}
static ncclComm_t split_among(ncclComm_t c, int color, int key) {
  std::vector<int64_t> all(2 * c->size);
  int64_t own[2] = {color, key};
  uint64_t number = c->posted;
  ranks::await(ranks::post(c, {"ncclAllGather", (const char*)own, (char*)all.data(), sizeof own, 0, ncclInt8, ncclSum, 0}));
  std::map<std::pair<int64_t, int>, int> members;  // by key, then by rank
  for (int r = 0; r < c->size; r++)
    if (all[2 * r] == color) members[{all[2 * r + 1], r}] = r;
  if (color < 0) return nullptr;
  int rank = 0;
  for (auto& each : members) {
    if (each.second == c->rank) break;
    rank++;
  }
  auto made = new ncclComm{rank, (int)members.size(), comms++};
  made->key = c->key + "_" + std::to_string(number) + "_" + std::to_string(color);
  ranks::join(made);
  return made;
}
API ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t* out, ncclConfig_t*) {
  if (within_capture()) return ncclInvalidUsage;
  if (!c->key.empty()) {
    *out = split_among(c, color, key);
    return ncclSuccess;
  }
  *out = color < 0 ? nullptr : new ncclComm{split_rank, split_size, comms++};
  return ncclSuccess;
}
API ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* r) {
  *r = ncclSuccess;
  return ncclSuccess;
}
API ncclResult_t ncclCommCount(const ncclComm_t c, int* n) {
  *n = c->size;
  return ncclSuccess;
}
API ncclResult_t ncclCommUserRank(const ncclComm_t c, int* n) {
  *n = c->rank;
  return ncclSuccess;
}
API ncclResult_t ncclCommCuDevice(const ncclComm_t, int* d) {
  *d = own_device;
  return ncclSuccess;
}
API const char* ncclGetErrorString(ncclResult_t) { return "rehearse nccl error"; }
API const char* ncclGetLastError(ncclComm_t) { return "none"; }
API ncclResult_t ncclMemAlloc(void** p, size_t n) { return device_alloc(p, n) ? ncclSystemError : ncclSuccess; }
API ncclResult_t ncclMemFree(void* p) {
  cudaFree(p);
  return ncclSuccess;
}
API ncclResult_t ncclAllReduce(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c,
                               cudaStream_t st) {
  size_t b = n * width(t);
  if (s != r && b <= SMALL) memmove(r, s, b);
  return collective("ncclAllReduce", s, b, r, b, c, st, t, op);
}
API ncclResult_t ncclReduceScatter(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c,
                                   cudaStream_t st) {
  size_t b = n * width(t);
  if (b <= SMALL) memmove(r, (char*)s + c->rank * b, b);
  return collective("ncclReduceScatter", s, b * c->size, r, b, c, st);
}
API ncclResult_t ncclAllGather(const void* s, void* r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t st) {
  size_t b = n * width(t);
  if (b <= SMALL) {
    std::vector<char> copy((char*)s, (char*)s + b);
    for (int i = 0; i < c->size; i++) memcpy((char*)r + i * b, copy.data(), b);
  }
  return collective("ncclAllGather", s, b, r, b * c->size, c, st);
}
API ncclResult_t ncclAlltoAll(const void* s, void* r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t st) {
  size_t b = n * width(t) * c->size;
  return collective("ncclAlltoAll", s, b, r, b, c, st);
}
API ncclResult_t ncclBroadcast(const void* s, void* r, size_t n, ncclDataType_t t, int root, ncclComm_t c,
                                 cudaStream_t st) {
  size_t b = n * width(t);
  if (s != r && b <= SMALL) memmove(r, s, b);
  return collective("ncclBroadcast", s, b, r, b, c, st, t, ncclSum, root);
}
API ncclResult_t ncclBcast(void* s, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t st) {
  return ncclBroadcast(s, s, n, t, root, c, st);
}
API ncclResult_t ncclReduce(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t, int, ncclComm_t c,
                            cudaStream_t st) {
  size_t b = n * width(t);
  return collective("ncclReduce", s, b, r, b, c, st);
}
API ncclResult_t ncclSend(const void* s, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t st) {
  size_t b = n * width(t);
  auto found = noted(peer == c->rank ? "ncclSend to itself" : "ncclSend", s, b, nullptr, 0, c, st);
  if (found == ncclSuccess && !c->key.empty()) asked(ranks::post(c, true, peer, b), st);
  return found;
}
API ncclResult_t ncclRecv(void* r, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t st) {
  size_t b = n * width(t);
  auto found = noted("ncclRecv", nullptr, 0, r, b, c, st);
  if (found == ncclSuccess && !c->key.empty()) asked(ranks::post(c, false, peer, b), st);
  return found;
}
API ncclResult_t ncclGroupStart() { return ncclSuccess; }
API ncclResult_t ncclGroupEnd() { return ncclSuccess; }
