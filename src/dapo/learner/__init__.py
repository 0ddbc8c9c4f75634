"""What learns: a batch becomes losses, gradients and new weights of policy and critic."""
