locals {
  labels = merge(var.labels, { cluster = var.name })

  # What a start-up script is told besides what it holds: no secrets, for all of it stands in the state.
  told = {
    HPCJOBS_NFS      = var.shared_kind == "filestore" && local.shared_protocol == "NFS_V3" ? "3" : "4.1"
    HPCJOBS_SHARED   = var.shared_kind == "filestore" ? "${google_filestore_instance.shared[0].networks[0].ip_addresses[0]}:/shared" : ""
    HPCJOBS_SSH_KEYS = join("\n", var.ssh_keys)
    HPCJOBS_USER     = var.ssh_user
  }

  metadata = {
    block-project-ssh-keys = "TRUE"
    enable-oslogin         = "FALSE" # one user of the cluster's own, the same number on every machine
    serial-port-enable     = "FALSE"
  }
}

resource "google_service_account" "machines" {
  account_id   = substr("${var.name}-nodes", 0, 30)
  display_name = "Machines of ${var.name}: no roles of its own"

  depends_on = [google_project_service.used]
}

resource "google_compute_instance" "head" {
  # checkov:skip=CKV_GCP_32:local.metadata blocks the project's keys, which checkov does not follow
  # checkov:skip=CKV_GCP_40:where a user comes in; ssh alone, from var.ssh_from
  name                      = "${var.name}-head"
  zone                      = var.zone
  machine_type              = var.head_machine_type
  tags                      = [var.name, "${var.name}-head"]
  labels                    = local.labels
  allow_stopping_for_update = true

  # Not metadata_startup_script: a change of that makes a new machine, of this the next start.
  metadata = merge(local.metadata, { startup-script = join("\n", [
    "#!/usr/bin/env bash",
    join("\n", [for name, value in merge(local.told, { HPCJOBS_ROLE = "head" }) : "export ${name}='${value}'"]),
    file("${path.module}/bootstrap.sh"),
  ]) })

  boot_disk {
    kms_key_self_link = var.kms_key

    initialize_params {
      image  = var.head_image
      size   = var.boot_disk_gb
      type   = var.boot_disk_type
      labels = local.labels
    }
  }

  dynamic "attached_disk" {
    for_each = google_compute_disk.shared
    content {
      source            = attached_disk.value.id
      device_name       = "shared"
      kms_key_self_link = var.kms_key
    }
  }

  network_interface {
    subnetwork = google_compute_subnetwork.cluster.id
    nic_type   = "GVNIC"

    # The one public address of the cluster.
    access_config {
      nat_ip = google_compute_address.head.address
    }
  }

  service_account {
    email  = google_service_account.machines.email
    scopes = var.scopes
  }

  shielded_instance_config {
    enable_secure_boot          = var.secure_boot
    enable_vtpm                 = true
    enable_integrity_monitoring = true
  }
}

resource "google_compute_instance" "worker" {
  # checkov:skip=CKV_GCP_32:local.metadata blocks the project's keys, which checkov does not follow
  count                     = var.nodes
  name                      = "${var.name}-${count.index + 1}"
  zone                      = var.zone
  machine_type              = var.machine_type
  tags                      = [var.name]
  labels                    = local.labels
  allow_stopping_for_update = true

  metadata = merge(local.metadata, { startup-script = join("\n", [
    "#!/usr/bin/env bash",
    join("\n", [for name, value in merge(local.told, {
      HPCJOBS_ROLE   = "worker"
      HPCJOBS_SHARED = coalesce(local.told.HPCJOBS_SHARED, "${google_compute_instance.head.network_interface[0].network_ip}:/shared")
    }) : "export ${name}='${value}'"]),
    file("${path.module}/bootstrap.sh"),
  ]) })

  boot_disk {
    kms_key_self_link = var.kms_key

    initialize_params {
      image  = var.image
      size   = var.boot_disk_gb
      type   = var.boot_disk_type
      labels = local.labels
    }
  }

  network_interface {
    subnetwork = google_compute_subnetwork.cluster.id
    nic_type   = "GVNIC"
  }

  dynamic "guest_accelerator" {
    for_each = var.gpu_type == null ? [] : [var.gpu_type]
    content {
      type  = guest_accelerator.value
      count = var.gpu_count
    }
  }

  scheduling {
    provisioning_model          = var.spot ? "SPOT" : "STANDARD"
    preemptible                 = var.spot
    automatic_restart           = !var.spot
    instance_termination_action = var.spot ? "STOP" : null
    # A machine with GPUs cannot move to another host while it runs, and neither can a spot one.
    on_host_maintenance = var.spot || var.gpu_count > 0 ? "TERMINATE" : "MIGRATE"
  }

  dynamic "reservation_affinity" {
    for_each = var.reservation == null ? [] : [var.reservation]
    content {
      type = "SPECIFIC_RESERVATION"
      specific_reservation {
        key    = "compute.googleapis.com/reservation-name"
        values = [reservation_affinity.value]
      }
    }
  }

  service_account {
    email  = google_service_account.machines.email
    scopes = var.scopes
  }

  shielded_instance_config {
    enable_secure_boot          = var.secure_boot
    enable_vtpm                 = true
    enable_integrity_monitoring = true
  }

  # Without the way out they could install nothing.
  depends_on = [google_compute_router_nat.out]

  lifecycle {
    precondition {
      condition     = var.nodes >= var.nodes_min && var.nodes <= var.nodes_max
      error_message = "nodes is ${var.nodes}: the site allows ${var.nodes_min} to ${var.nodes_max}."
    }
  }
}
