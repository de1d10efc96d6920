// SPDX-License-Identifier: MIT
// What softnic delivers on this machine: puts of one size from one endpoint to another, over 1 to N NICs at
// once.
//   softnic_bench [--nics N] [--bytes BYTES] [--seconds SECONDS] [--processes] [--gpu]
// The variables of softnic hold; without MK_SOFTNIC_NICS there are as many NICs as are asked for.
#include <infiniband/verbs.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bench_memory.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kInFlight = 16;

struct Options {
  int nics = 2;
  uint32_t bytes = 1 << 20;
  double seconds = 1;
  bool processes = false;
  bool gpu = false;
};

struct Contact {
  uint16_t lid;
  ibv_gid gid;
  uint32_t qp_number;
  uint64_t address;
  uint32_t rkey;
};

[[noreturn]] void stop(const char* what) {
  std::fprintf(stderr, "softnic_bench: %s failed (%s)\n", what, std::strerror(errno));
  std::exit(1);
}

struct Side {
  Side(int nic, const Options& options, int gpu)
      : memory(uint64_t{kInFlight} * options.bytes, options.gpu ? gpu : -1) {
    int count = 0;
    ibv_device** const devices = ibv_get_device_list(&count);
    if (devices == nullptr || nic >= count) stop("opening that NIC: MK_SOFTNIC_NICS is too small, or it");
    context = ibv_open_device(devices[nic]);
    if (context == nullptr) stop("ibv_open_device");
    ibv_free_device_list(devices);
    pd = ibv_alloc_pd(context);
    cq = ibv_create_cq(context, 4 * kInFlight, nullptr, nullptr, 0);
    mr = ibv_reg_mr(pd, memory.data(), memory.bytes(), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    if (mr == nullptr) stop("ibv_reg_mr");
    ibv_qp_init_attr attributes{};
    attributes.send_cq = attributes.recv_cq = cq;
    attributes.cap = {2 * kInFlight, 1, 1, 1, 0};
    attributes.qp_type = IBV_QPT_RC;
    qp = ibv_create_qp(pd, &attributes);
    if (qp == nullptr) stop("ibv_create_qp (RC: MK_SOFTNIC_KIND must be ib or roce)");
  }

  ~Side() {
    ibv_destroy_qp(qp);
    ibv_dereg_mr(mr);
    ibv_destroy_cq(cq);
    ibv_dealloc_pd(pd);
    ibv_close_device(context);
  }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  Contact contact() const {
    ibv_port_attr port{};
    Contact contact{};
    if (ibv_query_port(context, 1, &port) != 0 || ibv_query_gid(context, 1, 0, &contact.gid) != 0) {
      stop("ibv_query_port");
    }
    contact.lid = port.lid;
    contact.qp_number = qp->qp_num;
    contact.address = reinterpret_cast<uint64_t>(memory.data());
    contact.rkey = mr->rkey;
    return contact;
  }

  void connect(const Contact& peer) {
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_INIT;
    attributes.port_num = 1;
    attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    int error =
        ibv_modify_qp(qp, &attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    attributes.qp_state = IBV_QPS_RTR;
    attributes.path_mtu = IBV_MTU_4096;
    attributes.dest_qp_num = peer.qp_number;
    attributes.ah_attr.port_num = 1;
    attributes.ah_attr.dlid = peer.lid;
    attributes.ah_attr.is_global = peer.lid == 0 ? 1 : 0;
    attributes.ah_attr.grh.dgid = peer.gid;
    if (error == 0) {
      error = ibv_modify_qp(qp, &attributes,
                            IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    }
    attributes.qp_state = IBV_QPS_RTS;
    attributes.timeout = 14;
    attributes.retry_cnt = attributes.rnr_retry = 7;
    if (error == 0) {
      error = ibv_modify_qp(qp, &attributes,
                            IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
    }
    errno = error;
    if (error != 0) stop("ibv_modify_qp");
  }

  void put(const Contact& peer, uint64_t slot, uint32_t bytes) {
    ibv_sge segment{reinterpret_cast<uint64_t>(memory.data()) + slot * bytes, bytes, mr->lkey};
    ibv_send_wr request{};
    request.sg_list = &segment;
    request.num_sge = 1;
    request.opcode = IBV_WR_RDMA_WRITE;
    request.send_flags = IBV_SEND_SIGNALED;
    request.wr.rdma.remote_addr = peer.address + slot * bytes;
    request.wr.rdma.rkey = peer.rkey;
    ibv_send_wr* bad = nullptr;
    errno = ibv_post_send(qp, &request, &bad);
    if (errno != 0) stop("ibv_post_send");
  }

  // Completed puts; sleeps a little when there are none.
  int collect() {
    ibv_wc completions[kInFlight];
    const int polled = ibv_poll_cq(cq, kInFlight, completions);
    for (int index = 0; index < polled; ++index) {
      if (completions[index].status == IBV_WC_SUCCESS) continue;
      std::fprintf(stderr, "softnic_bench: %s\n", ibv_wc_status_str(completions[index].status));
      std::exit(1);
    }
    if (polled == 0) std::this_thread::yield();
    return polled;
  }

  softnic_bench::Memory memory;
  ibv_context* context = nullptr;
  ibv_pd* pd = nullptr;
  ibv_cq* cq = nullptr;
  ibv_mr* mr = nullptr;
  ibv_qp* qp = nullptr;
};

// GB/s of puts for so many seconds.
double measure_rate(Side& side, const Contact& peer, const Options& options) {
  const auto begin = Clock::now();
  const auto end =
      begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options.seconds));
  uint64_t posted = 0, completed = 0;
  while (Clock::now() < end || completed < posted) {
    while (Clock::now() < end && posted - completed < kInFlight) {
      side.put(peer, posted++ % kInFlight, options.bytes);
    }
    completed += static_cast<uint64_t>(side.collect());
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return static_cast<double>(completed) * options.bytes / seconds / 1e9;
}

// Microseconds from posting to completion of 8 bytes, one at a time.
double measure_latency(Side& side, const Contact& peer) {
  constexpr int kPuts = 1000;
  const auto begin = Clock::now();
  for (int count = 0; count < kPuts; ++count) {
    side.put(peer, 0, 8);
    while (side.collect() == 0) {
    }
  }
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / kPuts;
}

// The receiving end of all NICs in a process of its own: it talks with the sender through `socket`.
void serve(int socket, const Options& options) {
  std::vector<std::unique_ptr<Side>> sides;
  for (int nic = 0; nic < options.nics; ++nic) {
    sides.push_back(std::make_unique<Side>(nic, options, options.nics + nic));
    const Contact mine = sides.back()->contact();
    Contact peer{};
    if (write(socket, &mine, sizeof(mine)) != sizeof(mine) || read(socket, &peer, sizeof(peer)) != sizeof(peer))
      return;
    sides.back()->connect(peer);
    char ready = 1;
    if (write(socket, &ready, 1) != 1) return;
  }
  char done = 0;
  [[maybe_unused]] const ssize_t got = read(socket, &done, 1);
}

void run(const Options& options, int socket) {
  std::vector<std::unique_ptr<Side>> senders, receivers;
  std::vector<Contact> peers;
  for (int nic = 0; nic < options.nics; ++nic) {
    senders.push_back(std::make_unique<Side>(nic, options, nic));
    const Contact mine = senders.back()->contact();
    Contact peer{};
    char ready = 0;
    if (socket >= 0) {
      if (read(socket, &peer, sizeof(peer)) != sizeof(peer) ||
          write(socket, &mine, sizeof(mine)) != sizeof(mine) || read(socket, &ready, 1) != 1) {
        stop("the receiving process");
      }
    } else {
      receivers.push_back(std::make_unique<Side>(nic, options, options.nics + nic));
      peer = receivers.back()->contact();
      receivers.back()->connect(mine);
    }
    senders.back()->connect(peer);
    peers.push_back(peer);
  }
  std::printf("8-byte put, one at a time: %.1f us from post to completion\n",
              measure_latency(*senders[0], peers[0]));
  for (int active = 1; active <= options.nics; ++active) {
    std::vector<double> rates(static_cast<size_t>(active));
    std::vector<std::thread> threads;
    for (size_t nic = 0; nic < rates.size(); ++nic) {
      threads.emplace_back([&, nic] { rates[nic] = measure_rate(*senders[nic], peers[nic], options); });
    }
    for (std::thread& thread : threads) thread.join();
    std::printf("%u-byte puts, %d NIC%s at once:", options.bytes, active, active == 1 ? "" : "s");
    for (const double rate : rates) std::printf(" %.2f", rate);
    std::printf(" GB/s\n");
  }
}

Options parse(int argc, char** argv) {
  Options options;
  for (int index = 1; index < argc; ++index) {
    const std::string name = argv[index];
    const char* const value = index + 1 < argc ? argv[index + 1] : nullptr;
    if (name == "--processes") {
      options.processes = true;
    } else if (name == "--gpu") {
      options.gpu = true;
    } else if (name == "--nics" && value != nullptr) {
      options.nics = std::max(1, std::atoi(argv[++index]));
    } else if (name == "--bytes" && value != nullptr) {
      options.bytes = static_cast<uint32_t>(std::max(8, std::atoi(argv[++index])));
    } else if (name == "--seconds" && value != nullptr) {
      options.seconds = std::atof(argv[++index]);
    } else {
      std::fprintf(
          stderr,
          "usage: softnic_bench [--nics N] [--bytes BYTES] [--seconds SECONDS] [--processes] [--gpu]\n"
          "  --processes  the receiving ends in another process\n"
          "  --gpu        GPU memory: NIC i sends from GPU i to GPU N + i, modulo the GPUs there are\n");
      std::exit(2);
    }
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  setenv("MK_SOFTNIC_NICS", std::to_string(options.nics).c_str(), 0);
  setenv("MK_SOFTNIC_FABRIC", ("bench-" + std::to_string(getpid())).c_str(), 0);
  if (!options.processes) {
    run(options, -1);
    return 0;
  }
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) stop("socketpair");
  const pid_t child = fork();
  if (child < 0) stop("fork");
  if (child == 0) {
    close(ends[0]);
    serve(ends[1], options);
    return 0;
  }
  close(ends[1]);
  run(options, ends[0]);
  close(ends[0]);
  waitpid(child, nullptr, 0);
  return 0;
}
