locals {
  head_address = split("/", nebius_compute_v1_instance.head.status.network_interfaces[0].public_ip_address.address)[0]
}

output "head_address" {
  description = "Public address of the head."
  value       = local.head_address
}

output "nodes" {
  description = "Names of the worker nodes, with their addresses inside the cluster."
  value       = { for node in nebius_compute_v1_instance.worker : node.name => split("/", node.status.network_interfaces[0].ip_address.address)[0] }
}

output "ssh" {
  description = "How to log in."
  value       = "ssh ${var.ssh_user}@${local.head_address}"
}

output "submit" {
  description = "A first job, from your machine."
  value       = "ssh ${var.ssh_user}@${local.head_address} hpcjobs submit --site ${var.name} --wait ${var.first_job}"
}
