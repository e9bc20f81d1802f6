# A network of the cluster's own. From outside only the head is reached, by ssh; the nodes go out through NAT.

# Services of the provider that a fresh project has not enabled. Others may use them, so they stay on afterwards.
resource "google_project_service" "used" {
  for_each = toset(concat(
    ["compute.googleapis.com", "iam.googleapis.com"],
    var.shared_kind == "filestore" ? ["file.googleapis.com"] : [],
  ))

  service            = each.value
  disable_on_destroy = false
}

resource "google_compute_network" "cluster" {
  name                    = var.name
  auto_create_subnetworks = false

  depends_on = [google_project_service.used]
}

resource "google_compute_subnetwork" "cluster" {
  name                     = var.name
  network                  = google_compute_network.cluster.id
  region                   = var.region
  ip_cidr_range            = var.cidr
  private_ip_google_access = true

  log_config {
    aggregation_interval = "INTERVAL_10_MIN"
    flow_sampling        = 0.1
  }
}

resource "google_compute_firewall" "ssh" {
  name          = "${var.name}-ssh"
  description   = "People to the head"
  network       = google_compute_network.cluster.id
  source_ranges = var.ssh_from
  target_tags   = ["${var.name}-head"]

  allow {
    protocol = "tcp"
    ports    = ["22"]
  }
}

resource "google_compute_firewall" "inside" {
  name        = "${var.name}-inside"
  description = "All TCP between machines of the cluster: the rendezvous of a job, MPI, NCCL, Gloo and srun choose ports at run time"
  network     = google_compute_network.cluster.id
  source_tags = [var.name]
  target_tags = [var.name]

  allow {
    protocol = "tcp"
  }

  allow {
    protocol = "icmp"
  }
}

resource "google_compute_router" "out" {
  name    = var.name
  network = google_compute_network.cluster.id
  region  = var.region
}

resource "google_compute_router_nat" "out" {
  name                               = var.name
  router                             = google_compute_router.out.name
  region                             = var.region
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "ALL_SUBNETWORKS_ALL_IP_RANGES"
}

resource "google_compute_address" "head" {
  name   = "${var.name}-head"
  region = var.region

  depends_on = [google_project_service.used]
}
