// Several ranks on one machine: their collectives meet in files that all of them map. A collective is complete once
// every rank of its communicator has asked for it; who asks for another one than the others ends with what each asked
// for. Small ones carry their data, as numbers and objects that the host reads; of the rest only sizes are compared.
#pragma once
#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace ranks {
const uint64_t RING = 1024;       // collectives that a rank may be ahead of the last one
const size_t SLOT = 256 << 10;    // bytes that one may carry
std::recursive_mutex lock;

inline const char* folder() { return getenv("REHEARSE_RANKS"); }

struct Entry {
  char name[24];
  uint64_t sent, received, root;
};
struct Side {
  std::atomic<uint64_t> posted, consumed;
  Entry ring[RING];
};
struct Pair {  // bytes that one rank sends another, and those that the other takes
  std::atomic<uint64_t> sent, taken;
  uint64_t sizes[2][RING];
};
struct Asked {
  std::string name;
  const char* from;
  char* to;
  size_t sent, received;
  ncclDataType_t type;
  ncclRedOp_t op;
  int root;
};
}  // namespace ranks

struct ncclComm {
  int rank, size, id;
  std::string key;  // what others know it by; empty for a rank that is alone
  char* mapped = nullptr;
  uint64_t posted = 0, completed = 0;
  std::deque<ranks::Asked> asked;
  std::vector<uint64_t> sent, taken;

  std::atomic<int>& joined() { return *(std::atomic<int>*)mapped; }
  std::atomic<int>& failed() { return ((std::atomic<int>*)mapped)[1]; }
  ranks::Side& side(int r) { return ((ranks::Side*)(mapped + 64))[r]; }
  ranks::Pair& pair(int from, int to) {
    return ((ranks::Pair*)(mapped + 64 + size * sizeof(ranks::Side)))[from * size + to];
  }
  char* slot(int r, uint64_t number) {
    char* slots = mapped + 64 + size * sizeof(ranks::Side) + size * size * sizeof(ranks::Pair);
    return slots + (r * ranks::RING + number % ranks::RING) * ranks::SLOT;
  }
};

namespace ranks {
typedef std::lock_guard<std::recursive_mutex> Guard;
std::vector<ncclComm*> comms;
// How far each of a communicator's queues has to be: 0 of collectives, 1 + peer of sends, 1 + size + peer of receives.
typedef std::map<std::pair<ncclComm*, int>, uint64_t> Needs;

inline void need(Needs& into, const Needs& from) {
  for (auto& each : from)
    if (into[each.first] < each.second) into[each.first] = each.second;
}

inline void join(ncclComm* c) {
  std::string path = std::string(folder()) + "/" + c->key;
  size_t bytes = 64 + c->size * sizeof(Side) + c->size * c->size * sizeof(Pair) + c->size * RING * SLOT;
  int file = open(path.c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, bytes)) abort();
  c->mapped = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (c->mapped == MAP_FAILED) abort();
  c->sent.resize(c->size, 0);
  c->taken.resize(c->size, 0);
  c->joined()++;
  while (c->joined() < c->size) usleep(200);
  Guard g(lock);
  comms.push_back(c);
}

template <class T>
void reduce(T* to, const T* from, size_t n, ncclRedOp_t op) {
  for (size_t i = 0; i < n; i++)
    to[i] = op == ncclMax ? (from[i] > to[i] ? from[i] : to[i]) : op == ncclMin ? (from[i] < to[i] ? from[i] : to[i])
                                                                                : (T)(to[i] + from[i]);
}
inline void reduce(char* to, const char* from, size_t bytes, ncclDataType_t type, ncclRedOp_t op) {
  switch (type) {
    case ncclInt32:
      return reduce((int32_t*)to, (const int32_t*)from, bytes / 4, op);
    case ncclInt64:
      return reduce((int64_t*)to, (const int64_t*)from, bytes / 8, op);
    case ncclFloat32:
      return reduce((float*)to, (const float*)from, bytes / 4, op);
    case ncclFloat64:
      return reduce((double*)to, (const double*)from, bytes / 8, op);
    case ncclInt8:
    case ncclUint8:
      return reduce((uint8_t*)to, (const uint8_t*)from, bytes, op);
    default:
      return;  // of gradients, which nobody has computed
  }
}

inline void give_up(ncclComm* c) {
  fflush(stderr);
  c->failed() = 1;
  _exit(66);
}

inline void end(ncclComm* c, const char* why, uint64_t number) {
  for (int r = 0; r < c->size; r++) {
    Entry& e = c->side(r).ring[number % RING];
    fprintf(stderr, "rehearse: %s: collective %llu of communicator %s: rank %d asked for %s of %llu bytes\n", why,
            (unsigned long long)number, c->key.c_str(), r, e.name, (unsigned long long)e.sent);
  }
  give_up(c);
}

inline void complete(ncclComm* c) {
  const Asked& a = c->asked.front();
  uint64_t number = c->completed;
  Entry& own = c->side(c->rank).ring[number % RING];
  for (int r = 0; r < c->size; r++) {
    Entry& e = c->side(r).ring[number % RING];
    if (strcmp(e.name, own.name) || e.sent != own.sent || e.received != own.received || e.root != own.root)
      end(c, "ranks ask for different collectives", number);
  }
  if (a.sent <= SLOT && a.to) {
    if (a.name == "ncclAllGather")
      for (int r = 0; r < c->size; r++) memcpy(a.to + r * a.sent, c->slot(r, number), a.sent);
    else if (a.name == "ncclAlltoAll")
      for (int r = 0; r < c->size; r++)
        memcpy(a.to + r * (a.sent / c->size), c->slot(r, number) + c->rank * (a.sent / c->size), a.sent / c->size);
    else if (a.name == "ncclBroadcast")
      memcpy(a.to, c->slot(a.root, number), a.received);
    else if (a.name == "ncclAllReduce") {
      memcpy(a.to, c->slot(0, number), a.sent);
      for (int r = 1; r < c->size; r++) reduce(a.to, c->slot(r, number), a.sent, a.type, a.op);
    }
  }
  c->asked.pop_front();
  c->side(c->rank).consumed = ++c->completed;
}

inline void progress() {
  Guard g(lock);
  for (auto c : comms) {
    if (c->failed()) _exit(66);  // the other one has said why
    while (!c->asked.empty()) {
      bool all = true;
      for (int r = 0; r < c->size; r++) all = all && c->side(r).posted > c->completed;
      if (!all) break;
      complete(c);
    }
  }
}

inline bool done(const Needs& needs) {
  progress();
  Guard g(lock);
  for (auto& each : needs) {
    ncclComm* c = each.first.first;
    int queue = each.first.second;
    uint64_t reached = queue == 0             ? c->completed
                       : queue <= c->size     ? c->pair(c->rank, queue - 1).taken.load()
                                              : c->pair(queue - 1 - c->size, c->rank).sent.load();
    if (reached < each.second) return false;
  }
  return true;
}
inline void await(const Needs& needs) {
  while (!needs.empty() && !done(needs)) usleep(100);
}

// Ask for a collective; what a stream needs before it goes on.
inline Needs post(ncclComm* c, const Asked& a) {
  uint64_t number;
  {
    Guard g(lock);
    number = c->posted++;
  }
  for (bool room = false; !room;) {
    progress();
    room = true;
    for (int r = 0; r < c->size; r++) room = room && c->side(r).consumed + RING > number;
    if (!room) usleep(100);
  }
  Guard g(lock);
  Side& own = c->side(c->rank);
  Entry& e = own.ring[number % RING];
  memset(&e, 0, sizeof e);
  strncpy(e.name, a.name.c_str(), sizeof e.name - 1);
  e.sent = a.sent;
  e.received = a.received;
  e.root = a.root;
  if (a.from && a.sent <= SLOT) memcpy(c->slot(c->rank, number), a.from, a.sent);
  c->asked.push_back(a);
  own.posted = number + 1;
  progress();
  return {{{c, 0}, number + 1}};
}

// A send, or a receive, of which the two sides have to agree in bytes.
inline Needs post(ncclComm* c, bool sends, int peer, size_t bytes) {
  Guard g(lock);
  Pair& pair = sends ? c->pair(c->rank, peer) : c->pair(peer, c->rank);
  uint64_t number = sends ? c->sent[peer]++ : c->taken[peer]++;
  pair.sizes[!sends][number % RING] = bytes;
  std::atomic<uint64_t>&mine = sends ? pair.sent : pair.taken, &theirs = sends ? pair.taken : pair.sent;
  mine = number + 1;
  if (theirs > number && pair.sizes[0][number % RING] != pair.sizes[1][number % RING]) {
    auto other = (unsigned long long)pair.sizes[sends][number % RING];
    fprintf(stderr, "rehearse: rank %d %s %zu bytes, rank %d has %llu\n", c->rank, sends ? "sends" : "takes", bytes,
            peer, other);
    give_up(c);
  }
  return {{{c, sends ? 1 + peer : 1 + c->size + peer}, number + 1}};
}
}  // namespace ranks
