package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"gorm.io/gorm"

	"github.com/gormoutbox/outbox"
)

// loads are how often messages come, and for how long in a run.
var loads = []struct {
	name  string
	every time.Duration
	n     int
}{
	{"idle", 100 * time.Millisecond, 100},
	{"200/s", 5 * time.Millisecond, 1000},
}

// arrivalTimeout is how long the last messages of a run may take.
const arrivalTimeout = 10 * time.Second

// arrival is a message at its relay.
type arrival struct {
	serial int
	at     time.Time
}

// latency reports the time from commit to delivery.
func latency(ctx context.Context, b *bench) error {
	for _, place := range []struct {
		name  string
		relay func(ctx context.Context, dsn string) (*relaying, error)
	}{{"one process", relayHere}, {"two processes", relayElsewhere}} {
		dsn, err := b.postgres(ctx, place.name)
		if err != nil {
			return err
		}
		r, err := place.relay(ctx, dsn)
		if err != nil {
			return err
		}
		if err := errors.Join(r.report(ctx, b, "latency "+place.name), r.stop()); err != nil {
			return fmt.Errorf("%s: %w", place.name, err)
		}
	}
	return nil
}

// relaying is a publisher and what its relay has got.
type relaying struct {
	db       *gorm.DB
	arrivals chan arrival
	stop     func() error
	payload  []byte
	serial   int // of the next message
}

// report measures all loads.
func (r *relaying) report(ctx context.Context, b *bench, name string) error {
	for _, load := range loads {
		p50 := series{name: name + ", " + load.name + ", p50", unit: "ms"}
		p99 := series{name: name + ", " + load.name + ", p99", unit: "ms"}
		for range b.runs {
			took, err := r.measure(ctx, load.every, load.n)
			if err != nil {
				return err
			}
			slices.Sort(took)
			p50.runs = append(p50.runs, percentile(took, 50))
			p99.runs = append(p99.runs, percentile(took, 99))
		}
		b.add(p50, p99)
	}
	return nil
}

// percentile is the least of the sorted times that p of 100 do not exceed, in
// milliseconds.
func percentile(sorted []time.Duration, p int) float64 {
	return float64(sorted[(len(sorted)*p+99)/100-1].Microseconds()) / 1000
}

// measure publishes n messages at a steady pace and returns how long each took
// from its commit to its relay.
func (r *relaying) measure(ctx context.Context, every time.Duration, n int) ([]time.Duration, error) {
	first := r.serial
	committed := make([]time.Time, n)
	tick := time.NewTicker(every)
	defer tick.Stop()
	arrived := make(map[int]time.Time, n)
	for i := range n {
		for waiting := true; waiting; {
			select {
			case a := <-r.arrivals:
				arrived[a.serial-first] = a.at
			case <-tick.C:
				waiting = false
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		if err := r.publish(ctx); err != nil {
			return nil, err
		}
		committed[i] = time.Now()
	}
	ctx, cancel := context.WithTimeout(ctx, arrivalTimeout)
	defer cancel()
	for len(arrived) < n {
		select {
		case a := <-r.arrivals:
			arrived[a.serial-first] = a.at
		case <-ctx.Done():
			return nil, fmt.Errorf("%d of %d messages arrived: %w", len(arrived), n, ctx.Err())
		}
	}
	took := make([]time.Duration, n)
	for i := range n {
		// Without the monotonic clock, which another process does not share.
		took[i] = arrived[i].Sub(committed[i].Round(0))
	}
	return took, nil
}

// publish commits a message that carries its serial number.
func (r *relaying) publish(ctx context.Context) error {
	binary.BigEndian.PutUint64(r.payload, uint64(r.serial))
	m := outbox.Message{Type: messageType, GroupKey: "group-" + strconv.Itoa(r.serial), Payload: r.payload}
	r.serial++
	return r.db.WithContext(ctx).Transaction(func(tx *gorm.DB) error { return outbox.Add(tx, m) })
}

// reporter is a relay that tells which messages arrive when.
type reporter func(arrival)

// Deliver implements outbox.Relay.
func (r reporter) Deliver(_ context.Context, batch []outbox.Envelope) error {
	at := time.Now().Round(0)
	for i := range batch {
		r(arrival{int(binary.BigEndian.Uint64(batch[i].Payload)), at})
	}
	return nil
}

// relayHere publishes and relays by one instance.
func relayHere(ctx context.Context, dsn string) (*relaying, error) {
	r := &relaying{payload: payload(), arrivals: make(chan arrival, loads[1].n)}
	db, pool, err := open(dsn)
	if err != nil {
		return nil, err
	}
	in, err := install(ctx, db, outbox.Config{}, outbox.Outbox{Relay: reporter(func(a arrival) { r.arrivals <- a })})
	if err == nil {
		err = in.Start(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, pool.Close())
	}
	r.db = db
	r.stop = func() error { return errors.Join(in.Stop(context.WithoutCancel(ctx)), pool.Close()) }
	return r, nil
}
