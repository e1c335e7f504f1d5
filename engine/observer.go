package engine

import "time"

// ObservationKind says what was observed.
type ObservationKind int

const (
	// BatchDone: a batch was handed to the relay and settled, or not.
	BatchDone ObservationKind = iota
	// OutageBegan: a worker waits because the destination is unavailable.
	OutageBegan
	// OutageEnded: the worker got through again.
	OutageEnded
	// OwnershipLost: a worker lost its partition while the relay worked.
	OwnershipLost
	// DeliveryAbandoned: the relay ignored the end of its context; the
	// partition is not served in this process until the call returns.
	DeliveryAbandoned
	// SettleFailed: what was delivered could not be recorded, so it may be
	// delivered again.
	SettleFailed
)

// Observation is one thing that happened to a partition in this process.
type Observation struct {
	Kind      ObservationKind
	Outbox    string
	Partition int
	// Of a BatchDone: what became of the batch's messages.
	Delivered, Failed, Dead, NotAttempted int
	// Took is how long the relay worked on the batch.
	Took time.Duration
	// Lag is the age of the batch's oldest message since it was due, when it
	// was fetched, by the database's clock.
	Lag time.Duration
	Err error
}

// Observer is told what the workers do: the way to metrics. Observe is called
// on the workers' goroutines, concurrently: it must be quick and not block. A
// panic in it is caught and logged once.
type Observer interface {
	Observe(o Observation)
}
