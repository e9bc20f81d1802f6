# shellcheck shell=bash
# furnish ROOT: mounts over a Debian's files what it has when it runs. For namespaces of mounts and processes of their own.
furnish() {
    local root=$1 device
    mount -t proc proc "$root/proc"
    mount --rbind /sys "$root/sys"
    mount -t tmpfs -o mode=755 tmpfs "$root/run"
    mkdir -p "$root/run/lock" "$root/run/sshd"
    mount -t tmpfs tmpfs "$root/dev"
    for device in null zero full random urandom tty fuse; do
        [[ -e /dev/$device ]] || continue
        touch "$root/dev/$device"
        mount --bind "/dev/$device" "$root/dev/$device"
    done
    mkdir "$root/dev/shm" "$root/dev/pts"
    mount -t tmpfs tmpfs "$root/dev/shm"
    mount -t devpts devpts "$root/dev/pts" -o newinstance,ptmxmode=0666,mode=620,gid=5
    ln -s pts/ptmx "$root/dev/ptmx"
    ln -s /proc/self/fd "$root/dev/fd"
    ln -s /proc/self/fd/0 "$root/dev/stdin"
    ln -s /proc/self/fd/1 "$root/dev/stdout"
    ln -s /proc/self/fd/2 "$root/dev/stderr"
}
