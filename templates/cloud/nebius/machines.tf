locals {
  labels = merge(var.labels, { cluster = var.name })

  # What a start-up script is told besides what it holds: no secrets, for all of it stands in the state.
  told = {
    HPCJOBS_SHARED   = var.shared_kind == "virtiofs" ? "shared" : ""
    HPCJOBS_SSH_KEYS = join("\n", var.ssh_keys)
    HPCJOBS_USER     = var.ssh_user
  }

  filesystems = [for filesystem in nebius_compute_v1_filesystem.shared : {
    attach_mode         = "READ_WRITE"
    mount_tag           = "shared"
    existing_filesystem = { id = filesystem.id }
  }]

  # Runs at every start, as GCP's start-up scripts do.
  boot_script = "/var/lib/cloud/scripts/per-boot/hpcjobs.sh"
  bootstrap   = file("${path.module}/bootstrap.sh")

  told_head   = merge(local.told, { HPCJOBS_ROLE = "head" })
  told_worker = merge(local.told, { HPCJOBS_ROLE = "worker" }, local.exported)

  # What the head exports, where the filesystem is a disk of its own.
  exported = var.shared_kind == "virtiofs" ? {} : {
    HPCJOBS_SHARED = "${split("/", nebius_compute_v1_instance.head.status.network_interfaces[0].ip_address.address)[0]}:/shared"
  }
}

# Joins the nodes by InfiniBand.
resource "nebius_compute_v1_gpu_cluster" "workers" {
  count             = var.fabric == null ? 0 : 1
  parent_id         = var.project
  name              = var.name
  infiniband_fabric = var.fabric
  labels            = local.labels
}

resource "nebius_compute_v1_instance" "head" {
  parent_id = var.project
  name      = "${var.name}-head"
  hostname  = "${var.name}-head"
  labels    = local.labels

  cloud_init_user_data = join("\n", ["#cloud-config", yamlencode({ write_files = [{
    path        = local.boot_script
    permissions = "0755"
    content = join("\n", [
      "#!/usr/bin/env bash",
      join("\n", [for name, value in local.told_head : "export ${name}='${value}'"]),
      local.bootstrap,
    ])
  }] })])

  resources = {
    platform = var.head_platform
    preset   = var.head_preset
  }

  boot_disk = {
    attach_mode = "READ_WRITE"
    managed_disk = {
      name = "${var.name}-head"
      spec = {
        type                = var.boot_disk_type
        size_gibibytes      = var.boot_disk_gb
        block_size_bytes    = 4096
        source_image_family = { image_family = var.head_image_family }
      }
    }
  }

  secondary_disks = [for disk in nebius_compute_v1_disk.shared : {
    attach_mode   = "READ_WRITE"
    device_id     = "shared"
    existing_disk = { id = disk.id }
  }]

  filesystems = local.filesystems

  network_interfaces = [{
    name              = "eth0"
    subnet_id         = local.subnet_id
    ip_address        = {}
    public_ip_address = { static = true } # the one public address of the cluster
    security_groups   = [{ id = nebius_vpc_v1_security_group.inside.id }, { id = nebius_vpc_v1_security_group.head.id }]
  }]
}

resource "nebius_compute_v1_instance" "worker" {
  count     = var.nodes
  parent_id = var.project
  name      = "${var.name}-${count.index + 1}"
  hostname  = "${var.name}-${count.index + 1}"
  labels    = local.labels

  cloud_init_user_data = join("\n", ["#cloud-config", yamlencode({ write_files = [{
    path        = local.boot_script
    permissions = "0755"
    content = join("\n", [
      "#!/usr/bin/env bash",
      join("\n", [for name, value in local.told_worker : "export ${name}='${value}'"]),
      local.bootstrap,
    ])
  }] })])

  resources = {
    platform = var.platform
    preset   = var.preset
  }

  gpu_cluster        = var.fabric == null ? null : { id = nebius_compute_v1_gpu_cluster.workers[0].id }
  preemptible        = var.spot ? { on_preemption = "STOP", priority = 3 } : null
  recovery_policy    = var.spot ? "FAIL" : "RECOVER"
  reservation_policy = var.reservation == null ? null : { policy = "STRICT", reservation_ids = [var.reservation] }

  boot_disk = {
    attach_mode = "READ_WRITE"
    managed_disk = {
      name = "${var.name}-${count.index + 1}"
      spec = {
        type                = var.boot_disk_type
        size_gibibytes      = var.boot_disk_gb
        block_size_bytes    = 4096
        source_image_family = { image_family = var.image_family }
      }
    }
  }

  filesystems = local.filesystems

  network_interfaces = [{
    name            = "eth0"
    subnet_id       = local.subnet_id
    ip_address      = {}
    security_groups = [{ id = nebius_vpc_v1_security_group.inside.id }]
  }]

  lifecycle {
    precondition {
      condition     = var.nodes >= var.nodes_min && var.nodes <= var.nodes_max
      error_message = "nodes is ${var.nodes}: the site allows ${var.nodes_min} to ${var.nodes_max}."
    }
  }
}
