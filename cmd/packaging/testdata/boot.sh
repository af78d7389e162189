#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# boot.sh LOWER WORK: boots the system in the directory LOWER, which stays as it is, as pid 1 of namespaces that the caller
# made. The system runs WORK/inside.sh, which writes to WORK/said, and ends. All mounts end with the namespaces.
set -eu

lower=$1 work=$2
mkdir "$work/mnt"
mount -t tmpfs tmpfs "$work/mnt"
mkdir "$work/mnt/upper" "$work/mnt/work" "$work/mnt/root"
mount -t overlay -o "lowerdir=$lower,upperdir=$work/mnt/upper,workdir=$work/mnt/work" overlay "$work/mnt/root"
root=$work/mnt/root

mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=755,nosuid tmpfs "$root/dev"
for node in null zero full random urandom tty; do
    touch "$root/dev/$node"
    mount --bind "/dev/$node" "$root/dev/$node"
done
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
ln -s /proc/self/fd/1 "$root/dev/stdout"
ln -s /proc/self/fd/2 "$root/dev/stderr"

mkdir "$root/run/trial"
mount --bind "$work" "$root/run/trial"
mkdir -p "$root/run/systemd/system"
cat > "$root/run/systemd/system/inside.target" << 'UNIT'
[Unit]
Requires=inside.service
UNIT
cat > "$root/run/systemd/system/inside.service" << 'UNIT'
[Unit]
DefaultDependencies=no
After=dbus.socket systemd-journald.service
SuccessAction=exit-force
FailureAction=exit-force
[Service]
Type=oneshot
ExecStart=/run/trial/inside.sh
StandardOutput=append:/run/trial/said
StandardError=append:/run/trial/said
UNIT

# A chroot would not do: the kernel makes no user namespace in one.
cd "$root"
pivot_root . mnt
umount -l /mnt
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system --unit=inside.target --log-target=console --log-level=warning
