#!/bin/busybox sh
# SPDX-License-Identifier: MIT
# shellcheck shell=dash
# The first and only process of the virtual machine: run.sh makes it /init and reads the lines with "MK: ".
export PATH=/bin:/sbin

# step NAME SECONDS COMMAND...
step() {
  name=$1 limit=$2 began=$(cut -d . -f 1 /proc/uptime)
  shift 2
  if timeout -s KILL "$limit" "$@" >/tmp/output 2>&1; then verdict=ok; else verdict=FAILED; fi
  [ $verdict = ok ] || tail -n 25 /tmp/output
  packets_text=$(sed -n 's/^\([0-9]* packets\)$/, \1/p' /tmp/output)
  echo "MK: $verdict $name$packets_text, $(($(cut -d . -f 1 /proc/uptime) - began)) s"
}

load_driver() {
  for module in crc32_generic udp_tunnel ip6_udp_tunnel ib_core ib_uverbs rdma_rxe dummy; do
    insmod /modules/$module.ko || return 1
  done
  ip link set lo up
  ip link show dummy0 >/dev/null 2>&1 || ip link add dummy0 type dummy
  ip addr add 192.168.77.1/24 dev dummy0
  ip link set dummy0 up
  rdma link add rxe0 type rxe netdev dummy0
}

# pair COMMAND...: a server of it, and a client.
pair() {
  "$@" >/tmp/server 2>&1 &
  sleep 2
  "$@" 192.168.77.1
}

packets() { cat /sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts; }

# counted LEAST COMMAND...: fails, too, when fewer packets went over soft-RoCE.
counted() {
  least=$1 before=$(packets)
  shift
  "$@" || return 1
  sent=$(($(packets) - before))
  echo "$sent packets"
  [ $sent -ge "$least" ]
}

# reported COMMAND...: a pair of perftest's. It states a rate only where it finds the processor's clock to be steady, which
# that of an emulated processor on a busy machine is not: no failure of what it measures.
reported() {
  pair "$@" >/tmp/report 2>&1 || grep -q "Can't produce a report" /tmp/report || { cat /tmp/report; return 1; }
}

case ${1:-} in
  load) load_driver; exit ;;
  pair) shift; pair "$@"; exit ;;
  counted) shift; counted "$@"; exit ;;
esac

/bin/busybox --install -s /sbin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/shm
mount -t tmpfs tmpfs /dev/shm
ulimit -l unlimited

step "soft-RoCE is up" 20 /init load
step "ibv_devinfo sees an active port" 10 sh -c 'ibv_devinfo -d rxe0 | grep PORT_ACTIVE'
step "ibv_rc_pingpong, 100 messages" 30 /init pair ibv_rc_pingpong -e -d rxe0 -g 1 -n 100
# 64 packets a write.
step "ib_write_bw" 30 /init counted 6400 reported ib_write_bw -d rxe0 -x 1 -s 65536 -n 100

export MK_TRANSPORT=rc MK_TEST_BACKENDS=rc MK_SOCKET_IFNAME=dummy0
step "GEMM operators, two nodes" 60 /init counted 10 /mk/test/rxe_vm/rxe_two_nodes --launches 24
step "endpoints and regions" 40 /init counted 10 /mk/test/transport/transport_endpoint_test \
  "regions differ*,early signals*,a put to a region that its owner*"
step "seeded schedules of puts" 60 /init counted 10 /mk/test/transport/transport_put_schedule_test "puts arrive before*"
MK_IB_SIGNAL=completion step "the same, signals after completions" 60 /init counted 10 \
  /mk/test/transport/transport_put_schedule_test "puts arrive before*"
step "peers that leave" 30 /init counted 10 /mk/test/transport/transport_flow_test "peers that leave one after the other*"
# soft-RoCE takes 5 s to send again, whatever it is told.
MK_IB_TIMEOUT=12 MK_IB_RETRY=1 step "a peer that vanishes" 60 /init counted 10 \
  /mk/test/transport/transport_flow_test "a peer that vanishes*"
echo "MK: end"
poweroff -f
