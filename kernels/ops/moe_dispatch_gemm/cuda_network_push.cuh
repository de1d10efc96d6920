// SPDX-License-Identifier: MIT
// MoE dispatch + GEMM between nodes: the CTAs that push. This rank's rows for its node go as in cuda_push.cuh,
// in the order in which they are computed, and in turn with the first of them, packed, those for other nodes to
// where the network reads them. Beside the rest of them some warps bring the rows that have come from other
// nodes to their places in this one.
#pragma once

#include "kernels/ops/moe_dispatch_gemm/cuda_push.cuh"
#include "kernels/ops/moe_routing/cuda_network_routing.cuh"

namespace mk::moe_dispatch_gemm {

// A counting CTA, all threads: by which item each token is packed, in the order in which they are.
template <int NUM_THREADS>
__device__ void place_leaders(const RankLaunch& launch, const NetworkParams& params,
                              const NetworkPlaces& places, moe::NetworkCountingStorage<NUM_THREADS>& smem) {
  auto* leaders = reinterpret_cast<uint32_t*>(
      launch.area(params.comm.rank, places.leaders(params.network, params.nodes.num_nodes)));
  moe::place_tokens(params.comm, params.routing, params.nodes, smem,
                    [&](int64_t item, int, uint32_t place) { leaders[place] = static_cast<uint32_t>(item); });
}

// The routes of packets from `first` on, of whose tokens each lane below `num` has an item; by a whole warp.
__device__ __forceinline__ void write_routes(const RankLaunch& launch, const NetworkParams& params,
                                             const Tables& tables, const NetworkPlaces& places, uint32_t first,
                                             int num, uint32_t item) {
  const moe::CudaRouting& routing = params.routing;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int begin = 0; begin < num * routing.topk; begin += 32) {
    const int packet = (begin + lane) / routing.topk;
    const int k = begin + lane - packet * routing.topk;
    const uint32_t token = __shfl_sync(~0u, item, packet & 31) / static_cast<uint32_t>(routing.topk);
    if (packet >= num) continue;
    const int64_t from = int64_t{token} * routing.topk + k;
    // From the L2: other SMs have written it.
    const int2 words = __ldcg(reinterpret_cast<const int2*>(routing.items + from));
    const bool is_sound =
        words.x >= 0 && words.x < routing.experts &&
        static_cast<uint32_t>(words.y) < tables.own_rows[words.x + 1] - tables.own_rows[words.x];
    const moe::RouteItem route{is_sound ? words.x : -1, words.y, 0,
                               params.row_scale != nullptr ? params.row_scale[from] : 1.0f};
    auto* to = reinterpret_cast<int4*>(launch.area(
        params.comm.rank, places.packet(params.network, first + packet) + params.network.row_bytes));
    if (k == 0) to[0] = {static_cast<int>(token), 0, 0, 0};
    to[1 + k] = *reinterpret_cast<const int4*>(&route);
  }
  __syncwarp();
}

// A warp's turns, from the `first`-th on, of those that all take one by one: the next is asked for ahead of its
// use, which then need not wait for it.
class TurnTickets {
 public:
  __device__ TurnTickets(const moe::Turns& turns, uint32_t* counter, uint32_t first = 0)
      : turns_(turns), counter_(counter), first_(first) {
    take();
  }
  __device__ bool next(int* list, uint32_t* index) {
    if (!turns_.at(first_ + __shfl_sync(~0u, ticket_, 0), list, index)) return false;
    take();
    return true;
  }

 private:
  __device__ void take() { ticket_ = threadIdx.x % 32 == 0 ? atomicAdd(counter_, 1u) : 0; }

  const moe::Turns& turns_;
  uint32_t* const counter_;
  const uint32_t first_;
  uint32_t ticket_;
};

// Turns that have been dealt out: `count` of them, every `stride`-th from the `next_turn`-th on.
struct DealtTurns {
  const moe::Turns& turns;
  uint32_t next_turn;
  uint32_t stride;
  uint32_t count;
  __device__ bool next(int* list, uint32_t* index) {
    if (count == 0 || !turns.at(next_turn, list, index)) return false;
    next_turn += stride;
    --count;
    return true;
  }
};

// push_rows() of several nodes: next(&unit) until it answers false. done(note), of the whole warp, is told of
// each unit that has arrived.
template <class Storage, class Next, class Done>
__device__ __forceinline__ void push_and_pack(const RankLaunch& launch, const NetworkParams& params,
                                              const Tables& tables, const NetworkPlaces& places,
                                              BulkPush<Storage>& push, Next&& next, Done&& done) {
  const moe::CudaRouting& routing = params.routing;
  const int lane = threadIdx.x % 32;
  const int row_bytes = static_cast<int>(params.layout.row_bytes);
  const uint32_t last_item = static_cast<uint32_t>(routing.num_items() - 1);
  const auto* order = reinterpret_cast<const uint32_t*>(launch.area(params.comm.rank, params.layout.order()));
  const auto* leaders = reinterpret_cast<const uint32_t*>(
      launch.area(params.comm.rank, places.leaders(params.network, params.nodes.num_nodes)));
  const Tracer tracer(params.comm.trace, trace_track());
  PushUnit unit{};
  int column = 0;
  bool has_last = false;  // a unit that is stored, but may not have arrived
  uint64_t last = 0;
  push.template move<PushPiece>(
      [&](PushPiece* piece) {
        if (unit.num_rows == 0 && !next(&unit)) return false;
        piece->rank = unit.rank;
        piece->row = unit.row;
        piece->num_rows = static_cast<int>(min(unit.num_rows, static_cast<uint32_t>(params.piece_rows)));
        piece->column = column;
        piece->num_bytes = min(params.piece_bytes, row_bytes - column);
        const uint32_t* items = unit.rank < routing.nranks ? order : leaders;
        piece->item = lane < piece->num_rows ? min(__ldcg(items + unit.position + lane), last_item) : 0;
        piece->note = unit.note;
        column += params.piece_bytes;
        if (column >= row_bytes) {
          column = 0;
          unit.row += piece->num_rows;
          unit.position += piece->num_rows;
          unit.num_rows -= piece->num_rows;
        }
        piece->ends_unit = unit.num_rows == 0;
        return true;
      },
      [&](const PushPiece& piece, uint8_t* buffer, uint64_t* loaded) {
        if (lane == 0) ptx::mbarrier_arrive_expect_tx(loaded, piece.num_rows * piece.num_bytes);
        __syncwarp();
        if (lane >= piece.num_rows) return;
        const int64_t token = piece.item / static_cast<uint32_t>(routing.topk);
        ptx::cp_async_bulk_shared_global(buffer + lane * piece.num_bytes,
                                         params.x + token * params.x_pitch + piece.column, piece.num_bytes,
                                         loaded);
      },
      [&](const PushPiece& piece, const uint8_t* buffer) {
        const bool is_packed = piece.rank >= routing.nranks;
        tracer.begin(TraceKind::copy, static_cast<uint32_t>(piece.note),
                     is_packed ? params.comm.rank : piece.rank);
        if (is_packed && lane < piece.num_rows) {
          ptx::cp_async_bulk_global_shared(
              launch.area(params.comm.rank, places.packet(params.network, piece.row + lane) + piece.column),
              buffer + lane * piece.num_bytes, piece.num_bytes);
        } else if (!is_packed && lane == 0) {
          ptx::cp_async_bulk_global_shared(launch.area(piece.rank, params.layout.row(piece.row) + piece.column),
                                           buffer, piece.num_rows * piece.num_bytes);
        }
        ptx::cp_async_bulk_commit_group();
        if (piece.column == 0 && is_packed) {
          write_routes(launch, params, tables, places, piece.row, piece.num_rows, piece.item);
        } else if (piece.column == 0 && lane < piece.num_rows) {
          write_origin(launch, params, piece.rank, piece.row + lane, piece.item);
        }
        // It has time to arrive while the next one is on its way.
        if (has_last) {
          push.template complete<1>();
          done(last);
        }
        has_last = piece.ends_unit;
        last = piece.note;
        tracer.end();
      });
  if (has_last) {
    push.template complete<0>();
    done(last);
  }
}

// Packets of a unit: several whole ones, or a part of one's row.
struct ForwardPiece {
  int first;
  int num_packets;
  int column;  // in bytes
  int num_bytes;
};

// A lane's row of a unit of packets from `packet` on, packet by packet and k by k; -1 where there is none. Its
// origin goes to its rank at once.
__device__ __forceinline__ ForwardRow begin_forward(const RankLaunch& launch, const NetworkParams& params,
                                                    const Tables& tables, const moe::Counts& counts, int source,
                                                    int64_t packet, int num_packets) {
  const moe::CudaRouting& routing = params.routing;
  const int index = static_cast<int>(threadIdx.x % 32) / routing.topk;
  const int k = static_cast<int>(threadIdx.x % 32) - index * routing.topk;
  if (index >= num_packets) return {-1, 0, 0, 0};
  const auto* route = reinterpret_cast<const int4*>(
      launch.area(params.comm.rank, params.network.packet(packet + index) + params.network.row_bytes));
  const int4 head = __ldcg(route);
  const int4 words = __ldcg(route + 1 + k);
  const ForwardRow found =
      forward_row(routing, params.nodes, tables, counts, source, words.x, static_cast<uint32_t>(words.y));
  if (found.rank < 0) return found;
  const RowOrigin origin{head.x, static_cast<int16_t>(source), static_cast<int16_t>(k), __int_as_float(words.w),
                         0};
  *reinterpret_cast<int4*>(launch.area(found.rank, params.layout.origin(found.row))) =
      *reinterpret_cast<const int4*>(&origin);
  return found;
}

// The rows of a unit from here to their places; a lane has one.
template <class Storage>
__device__ __forceinline__ void forward_rows(const RankLaunch& launch, const NetworkParams& params,
                                             BulkPush<Storage>& push, const ForwardRow& mine, int64_t packet,
                                             int num_packets) {
  const int lane = threadIdx.x % 32;
  const int my_packet = lane / params.routing.topk;
  const int row_bytes = static_cast<int>(params.network.row_bytes);
  const int packet_bytes = static_cast<int>(params.network.packet_bytes);
  const int whole = Storage::PIECE_BYTES / packet_bytes;  // packets that a buffer takes
  int first = 0, column = 0;
  push.template move<ForwardPiece>(
      [&](ForwardPiece* piece) {
        if (first >= num_packets) return false;
        *piece = {first, whole > 0 ? min(whole, num_packets - first) : 1, column,
                  whole > 0 ? row_bytes : min(params.piece_bytes, row_bytes - column)};
        column += piece->num_bytes;
        if (column >= row_bytes) {
          column = 0;
          first += piece->num_packets;
        }
        return true;
      },
      [&](const ForwardPiece& piece, uint8_t* buffer, uint64_t* loaded) {
        if (lane != 0) return;
        const int bytes = (piece.num_packets - 1) * packet_bytes + piece.num_bytes;
        ptx::mbarrier_arrive_expect_tx(loaded, bytes);
        ptx::cp_async_bulk_shared_global(
            buffer, launch.area(params.comm.rank, params.network.packet(packet + piece.first) + piece.column),
            bytes, loaded);
      },
      [&](const ForwardPiece& piece, const uint8_t* buffer) {
        const int in_piece = my_packet - piece.first;
        if (mine.rank >= 0 && in_piece >= 0 && in_piece < piece.num_packets) {
          ptx::cp_async_bulk_global_shared(launch.area(mine.rank, params.layout.row(mine.row) + piece.column),
                                           buffer + in_piece * packet_bytes, piece.num_bytes);
        }
        ptx::cp_async_bulk_commit_group();
      });
  push.template complete<0>();
}

// Counts a unit's rows, which have arrived, and tells of blocks that are complete.
__device__ __forceinline__ void count_forwarded(const RankLaunch& launch, const NetworkParams& params,
                                                const ForwardRow& mine, int relayed, int source) {
  const RankOrder& order = params.comm.order;
  ptx::fence_acq_rel_gpu();  // who counts the last row releases all to the system
  bool is_last = false;
  if (mine.rank >= 0) {
    const int list = relayed * order.num_local + params.nodes.local_rank[mine.rank];
    uint32_t* const count =
        &params.comm.state->counts[params.numbers.forward_count(list, static_cast<int>(mine.block))];
    is_last = atomicAdd(count, 1u) + 1 == mine.expected;
    if (is_last) ptx::st_relaxed_gpu(count, 0);
  }
  if (!__any_sync(~0u, is_last)) return;
  ptx::fence_acq_rel_sys();
  if (is_last) {
    launch.raise_flag_relaxed(
        mine.rank, params.first_flag + source * params.blocks_per_source + static_cast<int>(mine.block));
  }
  __syncwarp();
}

// A push warp that owes nobody anything: all packets and the rows of split experts have been dealt out, so it
// may wait.
template <class Storage>
__device__ __forceinline__ void forward_packets(const RankLaunch& launch, const NetworkParams& params,
                                                const Tables& tables, const moe::Turns& turns,
                                                BulkPush<Storage>& push) {
  const moe::CudaRouting& routing = params.routing;
  const RankOrder& order = params.comm.order;
  const moe::Counts counts(routing, launch.area(routing.rank, 0));
  const int own_node = params.nodes.node[routing.rank];
  const int lane = threadIdx.x % 32;
  const Tracer tracer(params.comm.trace, trace_track());
  int last_relayed = -1;
  int64_t begin = 0;  // of the last one's packets
  while (true) {
    uint32_t ticket = lane == 0 ? static_cast<uint32_t>(atomicAdd(&launch.progress().gather_ticket, 1u)) : 0;
    ticket = __shfl_sync(~0u, ticket, 0);
    int relayed = 0;
    uint32_t unit = 0;
    if (!turns.at(ticket, &relayed, &unit)) return;
    const int source = order.relayed[relayed];
    const uint32_t count = counts.node_tokens(source, own_node);
    const int chunk = params.chunks.chunk_of_unit(count, unit);
    if (relayed != last_relayed) begin = relayed_packets(params.nodes, counts, routing.rank, source);
    last_relayed = relayed;
    bool is_here = true;
    if (lane == 0) {
      is_here = launch.wait_flag(params.numbers.arrived_flag(source, chunk), DeviceRole::copy,
                                 DeviceObject::chunk, source, chunk);
    }
    if (!__shfl_sync(~0u, static_cast<int>(is_here), 0)) return;
    __syncwarp();
    // The copy engine is another proxy than the load that saw the flag.
    ptx::fence_proxy_async_global();
    tracer.begin(TraceKind::copy, chunk, source);
    const int64_t packet = begin + int64_t{unit} * params.chunks.unit_packets;
    const auto num_packets = static_cast<int>(params.chunks.packets_of_unit(count, unit));
    const ForwardRow mine = begin_forward(launch, params, tables, counts, source, packet, num_packets);
    __syncwarp();
    forward_rows(launch, params, push, mine, packet, num_packets);
    count_forwarded(launch, params, mine, relayed, source);
    tracer.end();
  }
}

// What a CTA that pushes knows beside its tables.
struct NetworkTurns {
  NetworkPlaces places;
  moe::Turns late;  // behind the first turns
  moe::Turns forwards;
};

// Rows of split experts, and packets: TurnTickets or DealtTurns, until they are through.
template <class Storage, class FirstTurns, class Done>
__device__ __forceinline__ void take_first_turns(const RankLaunch& launch, const NetworkParams& params,
                                                 const Tables& tables, const NetworkPlaces& places,
                                                 FirstTurns turns, BulkPush<Storage>& push, Done&& done) {
  const moe::CudaRouting& routing = params.routing;
  push_and_pack(
      launch, params, tables, places, push,
      [&](PushUnit* unit) {
        int list = 0;
        uint32_t index = 0;
        if (!turns.next(&list, &index)) return false;
        if (list < routing.nranks) {
          const uint32_t before = units_before_split(routing, tables, list, params.num_split);
          *unit = unit_of(routing, params.unit_rows, tables, list, before + index);
        } else {
          *unit = pack_unit_of(routing, params.chunks, places, list - routing.nranks, index);
        }
        return true;
      },
      done);
}

// What is left then to a push CTA's warps: half of them begin with the late rows, half with what arrives.
template <class Storage, class Done>
__device__ __forceinline__ void take_late_turns(const RankLaunch& launch, const NetworkParams& params,
                                                const Tables& tables, const NetworkTurns& network, int warp,
                                                BulkPush<Storage>& push, Done&& done) {
  const bool forwards_first = warp % 2 == 0;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    if (forwards_first == (half == 0)) {
      forward_packets(launch, params, tables, network.forwards, push);
      continue;
    }
    TurnTickets turns(network.late, &launch.progress().late_push_ticket);
    push_and_pack(
        launch, params, tables, network.places, push,
        [&](PushUnit* unit) {
          int list = 0;
          uint32_t index = 0;
          if (!turns.next(&list, &index)) return false;
          *unit = unit_of(params.routing, params.unit_rows, tables, list, index);
          return true;
        },
        done);
  }
}

// The warp of a CTA that counts and signals what the others have pushed and packed.
template <class Signals>
__device__ __forceinline__ void signal_turns(const RankLaunch& launch, const NetworkParams& params,
                                             const NetworkPlaces& places, Signals& signals) {
  const auto rank_of = [](uint64_t note) { return static_cast<int>(note >> 48); };
  const auto block_of = [](uint64_t note) { return static_cast<int>(note & 0xffffffff); };
  send_signals(
      signals,
      [&](uint64_t bits, uint32_t* expected) {
        const PackNote note{bits};
        if (note.is_packed()) {
          *expected = params.chunks.units_of_chunk(places.packed(note.node()), note.chunk());
          return &params.comm.state->counts[params.numbers.packed_count(note.node(), note.chunk())];
        }
        *expected = static_cast<uint32_t>(bits >> 32) & 0xffff;
        return &params.comm.state->counts[params.numbers.own_count(rank_of(bits), block_of(bits))];
      },
      [&](uint64_t bits) {
        const PackNote note{bits};
        if (note.is_packed()) {
          launch.raise_flag_relaxed(params.comm.rank, params.numbers.packed_flag(note.node(), note.chunk()));
        } else {
          launch.raise_flag_relaxed(
              rank_of(bits), params.first_flag + params.comm.rank * params.blocks_per_source + block_of(bits));
        }
      });
}

// By thread 0 of a CTA that pushes: the first turns of all.
template <class Storage>
__device__ __forceinline__ void begin_turns(const RankLaunch& launch, const NetworkParams& params,
                                            Storage& smem) {
  fill_turns(params.routing, params.nodes, params.comm.order, smem.tables, params.chunks, smem.network.places,
             params.num_split, smem.turns);
  moe::wait_routed(launch);
}

// Where rows are many, CTAs that compute have none to begin with: each of their warps takes turns first,
// together about as many as there are of packets, for which push CTAs would take long and the network waits.
// These turns come first.
template <class Config>
__device__ __forceinline__ uint32_t first_turns_each(const NetworkParams& params, const NetworkPlaces& places,
                                                     const moe::Turns& turns) {
  if (Config::NUM_CONSUMER_WARPGROUPS != 2) return 0;
  constexpr uint32_t MOST = 2;
  constexpr int NUM_WARPS = PushCtaStorage<Config::NUM_THREADS>::NUM_WARPS;
  const uint32_t packets = places.begins[params.nodes.num_nodes];
  const auto wanted = static_cast<uint32_t>(ceil_div(
      int64_t{params.chunks.num_units(packets)} * turns.num_lists, params.num_compute_ctas * NUM_WARPS));
  return wanted < MOST ? wanted : MOST;
}

// By a CTA that will compute. Not inlined, see push_first_turn().
template <class Config, class Storage>
__device__ __noinline__ void take_dealt_turns(const NetworkParams& params, Storage& smem) {
  if constexpr (Config::NUM_CONSUMER_WARPGROUPS == 2) {
    const RankLaunch launch(params.comm);
    auto& storage = smem.push();
    constexpr int NUM_WARPS = PushCtaStorage<Config::NUM_THREADS>::NUM_WARPS;
    const NetworkPlaces& places = smem.network.places;
    if (threadIdx.x == 0) begin_turns(launch, params, smem);
    push_cta_init(storage);
    const int warp = threadIdx.x / 32;
    if (warp < NUM_WARPS) {
      BulkPush<decltype(storage.push)> push(storage.push, warp);
      PushNotes notes(storage.signals, warp);
      const DealtTurns turns = {smem.turns, static_cast<uint32_t>(warp * params.num_compute_ctas + blockIdx.x),
                                static_cast<uint32_t>(NUM_WARPS * params.num_compute_ctas),
                                first_turns_each<Config>(params, places, smem.turns)};
      take_first_turns(launch, params, smem.tables, places, turns, push,
                       [&](uint64_t note) { notes.add(note); });
      notes.end();
    } else {
      signal_turns(launch, params, places, storage.signals);
    }
    push_cta_end(storage);
  }
}

// By a CTA that pushes until nothing is left, and may have another role then.
template <class Config, class Storage>
__device__ __noinline__ void run_network_push_cta(const NetworkParams& params, Storage& smem) {
  const RankLaunch launch(params.comm);
  auto& storage = smem.push();
  constexpr int NUM_WARPS = PushCtaStorage<Config::NUM_THREADS>::NUM_WARPS;
  const NetworkPlaces& places = smem.network.places;
  if (threadIdx.x == 0) {
    const moe::CudaRouting& routing = params.routing;
    const moe::Counts counts(routing, launch.area(routing.rank, 0));
    fill_late_turns(routing, params.comm.order, smem.tables, params.num_split, smem.network.late);
    fill_forward_turns(routing, params.nodes, params.comm.order, params.chunks, counts, smem.network.forwards);
    begin_turns(launch, params, smem);
  }
  push_cta_init(storage);
  const int warp = threadIdx.x / 32;
  if (warp < NUM_WARPS) {
    BulkPush<decltype(storage.push)> push(storage.push, warp);
    PushNotes notes(storage.signals, warp);
    const auto done = [&](uint64_t note) { notes.add(note); };
    const uint32_t dealt =
        first_turns_each<Config>(params, places, smem.turns) * NUM_WARPS * params.num_compute_ctas;
    take_first_turns(launch, params, smem.tables, places,
                     TurnTickets(smem.turns, &launch.progress().push_ticket, dealt), push, done);
    take_late_turns(launch, params, smem.tables, smem.network, warp, push, done);
    notes.end();
  } else {
    signal_turns(launch, params, places, storage.signals);
  }
  push_cta_end(storage);
}

}  // namespace mk::moe_dispatch_gemm
