# From outside only the head is reached, by ssh. A network of the cluster's own unless a subnet is named.

resource "nebius_vpc_v1_network" "cluster" {
  count     = var.subnet == null ? 1 : 0
  parent_id = var.project
  name      = var.name
  labels    = local.labels
}

resource "nebius_vpc_v1_subnet" "cluster" {
  count      = var.subnet == null ? 1 : 0
  parent_id  = var.project
  name       = var.name
  network_id = nebius_vpc_v1_network.cluster[0].id
  labels     = local.labels
}

data "nebius_vpc_v1_subnet" "existing" {
  count = var.subnet == null ? 0 : 1
  id    = var.subnet
}

locals {
  subnet_id  = var.subnet == null ? nebius_vpc_v1_subnet.cluster[0].id : var.subnet
  network_id = var.subnet == null ? nebius_vpc_v1_network.cluster[0].id : data.nebius_vpc_v1_subnet.existing[0].network_id
}

resource "nebius_vpc_v1_security_group" "inside" {
  parent_id  = var.project
  name       = "${var.name}-inside"
  network_id = local.network_id
  labels     = local.labels
}

resource "nebius_vpc_v1_security_group" "head" {
  parent_id  = var.project
  name       = "${var.name}-head"
  network_id = local.network_id
  labels     = local.labels
}

resource "nebius_vpc_v1_security_rule" "ssh" {
  parent_id = nebius_vpc_v1_security_group.head.id
  name      = "ssh"
  access    = "ALLOW"
  protocol  = "TCP"

  ingress = {
    source_cidrs      = var.ssh_from
    destination_ports = [22]
  }
}

# The machines of the cluster among themselves: ssh, NFS, Slurm, and whatever ports MPI and NCCL choose.
resource "nebius_vpc_v1_security_rule" "inside" {
  parent_id = nebius_vpc_v1_security_group.inside.id
  name      = "inside"
  access    = "ALLOW"
  protocol  = "ANY"

  ingress = {
    source_security_group_id = nebius_vpc_v1_security_group.inside.id
  }
}

resource "nebius_vpc_v1_security_rule" "out" {
  parent_id = nebius_vpc_v1_security_group.inside.id
  name      = "out"
  access    = "ALLOW"
  protocol  = "ANY"

  egress = {
    destination_cidrs = ["0.0.0.0/0"]
  }
}
