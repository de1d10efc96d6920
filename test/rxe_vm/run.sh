#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# The rc transport over the real libibverbs and the kernel's soft-RoCE driver, in a virtual machine: Debian's
# kernel, an initramfs made here, no network, no disk. Emulated without KVM, which may hang where it is nested.
#   run.sh BUILD_FOLDER [CACHE_FOLDER]
# Prints a line a step and "N passed, N failed". Exits with 77, "skipped", where something it needs is missing;
# with MK_REQUIRE_RXE=1 that is a failure.
set -euo pipefail

[ $# -ge 1 ] || { echo "usage: run.sh BUILD_FOLDER [CACHE_FOLDER]" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
build=$(cd "$1" && pwd)
mkdir -p "${2:-$build/rxe-vm}"
cache=$(cd "${2:-$build/rxe-vm}" && pwd)
readonly here build cache
readonly limit_s=${MK_RXE_LIMIT_S:-220}
readonly modules=(crc32_generic udp_tunnel ip6_udp_tunnel ib_core ib_uverbs rdma_rxe dummy)
readonly programs=(
  test/rxe_vm/rxe_two_nodes
  test/transport/transport_endpoint_test
  test/transport/transport_flow_test
  test/transport/transport_put_schedule_test
)

skip() {
  echo "SKIPPED, NOTHING WAS TESTED: $*"
  [ "${MK_REQUIRE_RXE:-0}" = 0 ] || exit 1
  exit 77
}

for tool in qemu-system-x86_64 busybox cpio rdma ip ibv_devinfo ibv_rc_pingpong ib_write_bw apt-get dpkg; do
  command -v "$tool" >/dev/null || skip "no $tool (tools/quickstart.sh deps --ci installs it)"
done
ldd "$(command -v busybox)" >/dev/null 2>&1 && skip "busybox is not static: the package busybox-static has one that is"

# The kernel that the distribution's metapackage stands for, downloaded once.
find_kernel() {
  local package
  package=$(apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/^ *Depends: \(linux-image-[0-9].*-amd64\)$/\1/p' | head -n 1)
  [ -n "$package" ] || skip "the package linux-image-amd64, Debian's kernel, is not known here"
  kernel=$cache/$package
  if [ ! -f "$kernel/.complete" ]; then
    rm -rf "$kernel"
    mkdir -p "$kernel"
    (cd "$kernel" && apt-get -o APT::Sandbox::User=root -q download "$package" && dpkg -x "$package"_*.deb . && rm -f "$package"_*.deb) ||
      skip "$package cannot be downloaded"
    touch "$kernel/.complete"
  fi
}

# copy FILE TARGET: with the shared libraries it needs, each at its own place.
copy() {
  local library
  install -D -m 755 "$1" "$root$2"
  ldd "$1" 2>/dev/null | grep -o '/[^ ]*' | while read -r library; do
    # What belongs to the build travels at its place in it.
    case $library in "$build"/*) continue ;; esac
    [ -e "$root$library" ] || install -D -m 755 "$library" "$root$library"
  done
}

make_initramfs() {
  local module program
  root=$cache/root
  rm -rf "$root"
  mkdir -p "$root"/{bin,sbin,proc,sys,dev,tmp,modules,etc/libibverbs.d,mk}
  install -m 755 "$(command -v busybox)" "$root/bin/busybox"
  for module in "${modules[@]}"; do
    find "$kernel/lib/modules" -name "$module.ko" -exec cp {} "$root/modules/" \;
    [ -f "$root/modules/$module.ko" ] || { echo "$kernel has no module $module"; exit 1; }
  done
  for program in rdma ip ibv_devinfo ibv_rc_pingpong ib_write_bw; do copy "$(command -v "$program")" "/bin/$program"; done
  program=$(find /usr/lib -name 'librxe-rdmav*.so' | head -n 1)
  [ -n "$program" ] || skip "no soft-RoCE driver for libibverbs (package ibverbs-providers)"
  copy "$program" "$program"
  # Loaded at run time, under the name that the library asks for.
  copy "$(ldd "$(command -v ibv_devinfo)" | sed -n 's/.*libibverbs.so.1 => \([^ ]*\).*/\1/p')" /lib/libibverbs.so.1
  echo "driver rxe" >"$root/etc/libibverbs.d/rxe.driver"
  for program in "${programs[@]}"; do
    [ -x "$build/$program" ] || { echo "$build/$program is not built"; exit 1; }
    copy "$build/$program" "/mk/$program"
  done
  find "$build" -maxdepth 1 -name 'libmkernel.so*' ! -type d -exec cp -P {} "$root/mk/" \;
  find "$root/mk" -type f -exec strip --strip-debug {} \; 2>/dev/null || true
  install -m 755 "$here/init.sh" "$root/init"
  (cd "$root" && find . | cpio --quiet -o -H newc >"$cache/initramfs")
}

find_kernel
make_initramfs
echo "kernel $(basename "$kernel"), initramfs $(du -m "$cache/initramfs" | cut -f 1) MB"
status=0
timeout --kill-after=5 "$limit_s" qemu-system-x86_64 -accel tcg -cpu max -smp 2 -m 1024 -nodefaults -no-user-config \
  -display none -serial stdio -no-reboot -kernel "$kernel"/boot/vmlinuz-* -initrd "$cache/initramfs" \
  -append "console=ttyS0 quiet panic=-1 mitigations=off" </dev/null >"$cache/console" 2>&1 || status=$?
tr -d '\r' <"$cache/console" | sed -n 's/^MK: //p'
passed=$(grep -c '^MK: ok ' "$cache/console" || true)
failed=$(grep -c '^MK: FAILED ' "$cache/console" || true)
if ! grep -q '^MK: end' "$cache/console"; then
  failed=$((failed + 1))
  echo "FAILED the machine did not come to its end within $limit_s s (status $status)"
fi
if [ "$failed" -ne 0 ]; then
  echo "---- the end of $cache/console"
  tail -n 60 "$cache/console"
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
