"""The learner: from a batch to losses, gradients and new weights of policy and critic."""
