"""Which tier reads which chunk next: a pure state machine, `machine.Schedule`."""
