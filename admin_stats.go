package outbox

import (
	"context"
	"time"

	"github.com/gormoutbox/outbox/dialect"
	"github.com/gormoutbox/outbox/engine"
)

// What Stats is made of. These types live in package dialect.
type (
	// OutboxStats is the state of an outbox.
	OutboxStats = dialect.OutboxStats //nolint:revive // Stats is that of the instance
	// LaneStats is the state of a partition.
	LaneStats = dialect.LaneStats
	// Counts are numbers of messages.
	Counts = dialect.Counts
	// BlockedGroup is a group that does not go on, by its head.
	BlockedGroup = dialect.BlockedGroup
	// Owner is a database session that owns a partition.
	Owner = dialect.Owner
	// LocalState is what this process's worker of a partition knows.
	LocalState = dialect.LocalState
	// FoundOutbox is an outbox with messages in a table that it is not
	// configured to be in.
	FoundOutbox = dialect.FoundOutbox
)

// Bounds of what Stats counts and lists. A number that has reached its bound
// says "or more".
const (
	// MaxCounted bounds each number of messages of a partition.
	MaxCounted = dialect.MaxCounted
	// MaxBlockedCounted bounds the number of blocked groups of a partition.
	MaxBlockedCounted = dialect.MaxBlockedCounted
	// MaxBlockedListed bounds the list of blocked groups of an outbox.
	MaxBlockedListed = dialect.MaxBlockedListed
)

// Stats is the state of an instance's outboxes.
type Stats struct {
	// At is when, by the clock that all instants of it are of: the database's
	// on PostgreSQL.
	At time.Time `json:"at"`
	// Push says how this process learns of messages of other nodes: "push",
	// "degraded" or "polling".
	Push string `json:"push"`
	// Outboxes are those of the configuration, in its order.
	Outboxes []OutboxStats `json:"outboxes"`
	// Found are outboxes with undelivered messages in one of the tables that
	// are not configured to be there: nobody here delivers them.
	Found []FoundOutbox `json:"found,omitempty"`
}

// Stats describes all outboxes. It reads the tables' partial indexes and counts
// no further than MaxCounted, so that its cost depends on the number of
// partitions and not on that of messages. Every node sees the same, except for
// what LaneStats.Local and Push say.
func (in *Instance) Stats(ctx context.Context) (Stats, error) {
	b, err := in.binding()
	if err != nil {
		return Stats{}, err
	}
	queries := make([]dialect.OutboxQuery, len(in.config.Outboxes))
	for i, o := range in.config.Outboxes {
		queries[i] = dialect.OutboxQuery{Name: o.Name, Ordering: o.Ordering, HoldDead: o.AfterDead == HoldGroup}
	}
	report, err := b.admin.Stats(ctx, queries)
	if err != nil {
		return Stats{}, administration(err)
	}
	stats := Stats{At: report.At, Push: engine.Polling.String(), Outboxes: report.Outboxes, Found: report.Found}
	for i := range stats.Outboxes {
		stats.Outboxes[i].Configured = in.config.Outboxes[i].Partitions
	}
	if eng := in.eng.Load(); eng != nil {
		stats.Push = eng.PushState().String()
		stats.addLocal(eng.States())
	}
	return stats, nil
}

// addLocal fills in what the workers of this process know.
func (s *Stats) addLocal(states []engine.PartitionState) {
	type key struct {
		outbox    string
		partition int
	}
	local := make(map[key]*LocalState)
	for _, p := range states {
		l := &LocalState{Owning: p.Owning, Stuck: p.Stuck, Since: p.Since}
		if p.Outage != nil {
			l.Outage = p.Outage.Error()
		}
		local[key{p.Outbox, p.Partition}] = l
	}
	for i := range s.Outboxes {
		o := &s.Outboxes[i]
		o.Unattended = 0
		for j := range o.Lanes {
			lane := &o.Lanes[j]
			if lane.Partitions == o.Partitions {
				lane.Local = local[key{o.Outbox, lane.Partition}]
			}
			if lane.Local != nil && lane.Local.Owning {
				lane.Unattended = 0
			}
			o.Unattended = max(o.Unattended, lane.Unattended)
		}
	}
}
