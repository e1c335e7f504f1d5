package integration

import (
	"context"
	"errors"
	"testing"
	"time"

	"gorm.io/gorm"

	"github.com/gormoutbox/outbox"
	"github.com/gormoutbox/outbox/backoff"
	"github.com/gormoutbox/outbox/internal/testdb"
)

// recorder is a relay that remembers what it got and can refuse it.
type recorder struct {
	refuse error
	got    []outbox.Envelope
}

func (r *recorder) Deliver(_ context.Context, batch []outbox.Envelope) error {
	if r.refuse != nil {
		var failed outbox.BatchError
		for _, e := range batch {
			failed.Fail(e.ID, r.refuse)
		}
		return &failed
	}
	r.got = append(r.got, batch...)
	return nil
}

// install makes an instance with one outbox on db.
func install(t *testing.T, db *gorm.DB, o outbox.Outbox) *outbox.Instance {
	t.Helper()
	o.Name = orders
	instance, err := outbox.New(outbox.Config{Outboxes: []outbox.Outbox{o}})
	must(t, err)
	must(t, db.Use(instance))
	must(t, outbox.AutoMigrate(db))
	return instance
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func addOne(t *testing.T, db *gorm.DB, m outbox.Message) (stored outbox.Envelope) {
	t.Helper()
	must(t, db.Transaction(func(tx *gorm.DB) error {
		list, err := outbox.AddReturning(tx, m)
		if err == nil {
			stored = list[0]
		}
		return err
	}))
	return stored
}

// An instant is the same whatever zone the sessions and the process are in,
// across a change of daylight saving time too, and every delay is measured by
// the database's clock alone. C40
func TestTimeZones(t *testing.T) {
	t.Parallel()
	pg := testdb.Postgres(t)
	zones := []string{"UTC", "Asia/Kathmandu", "America/New_York"}
	relays := make([]*recorder, len(zones))
	dbs := make([]*gorm.DB, len(zones))
	instances := make([]*outbox.Instance, len(zones))
	for i, zone := range zones {
		relays[i] = &recorder{}
		dbs[i] = pg.Gorm(t, testdb.Param("timezone", zone))
		instances[i] = install(t, dbs[i], outbox.Outbox{Relay: relays[i], Backoff: backoff.Constant(time.Hour)})
	}
	// New York's clocks skip an hour in the night of 12 March 2028.
	spring := time.Date(2028, 3, 12, 7, 30, 0, 123456000, time.UTC)
	kathmandu, err := time.LoadLocation(zones[1])
	must(t, err)
	for i, db := range dbs {
		later := addOne(t, db, outbox.Message{Type: "later", DeliverAt: spring.In(kathmandu)})
		if !later.ScheduledAt.Equal(spring) {
			t.Errorf("%s: scheduled at %v, want %v", zones[i], later.ScheduledAt, spring)
		}
		soon := addOne(t, db, outbox.Message{Type: "delayed", Delay: 90 * time.Minute})
		if d := soon.ScheduledAt.Sub(soon.InsertedAt); d != 90*time.Minute {
			t.Errorf("%s: delayed by %v, want 90m", zones[i], d)
		}
		past := addOne(t, db, outbox.Message{Type: "past", DeliverAt: time.Date(2001, 1, 1, 0, 0, 0, 0, kathmandu)})
		for j, reader := range instances {
			for _, want := range []outbox.Envelope{later, soon, past} {
				page, err := reader.Messages(t.Context(), outbox.Query{Outbox: orders, Filter: outbox.Filter{AfterID: want.ID - 1, BeforeID: want.ID + 1}})
				must(t, err)
				if m := page.Messages[0]; !m.InsertedAt.Equal(want.InsertedAt) {
					t.Errorf("added in %s at %v, read in %s as %v", zones[i], want.InsertedAt, zones[j], m.InsertedAt)
				}
			}
		}
		// Another session delivers what is due: that of the past, at once.
		next := (i + 1) % len(zones)
		_, err := instances[next].Drain(t.Context())
		must(t, err)
		if got := relays[next].got; len(got) != 1 || got[0].Type != "past" {
			t.Errorf("%s delivered %v, want what was due in the past", zones[next], got)
		}
		relays[next].got = nil
	}
}

// A retry is due when its delay has passed since the failure, in whatever zone
// the failure was recorded. C40
func TestRetryDelayAcrossZones(t *testing.T) {
	t.Parallel()
	pg := testdb.Postgres(t)
	failing := &recorder{refuse: errors.New("refused")}
	east := pg.Gorm(t, testdb.Param("timezone", "Asia/Kathmandu"))
	one := install(t, east, outbox.Outbox{Relay: failing, Backoff: backoff.Constant(time.Hour)})
	addOne(t, east, outbox.Message{Type: "t", GroupKey: "g"})
	_, err := one.Drain(t.Context())
	must(t, err)

	west := pg.Gorm(t, testdb.Param("timezone", "America/New_York"))
	relay := &recorder{}
	other := install(t, west, outbox.Outbox{Relay: relay})
	result, err := other.Drain(t.Context())
	must(t, err)
	if result.Delivered != 0 || result.Waiting != 1 {
		t.Errorf("drained %+v an hour before the retry, want it to wait", result)
	}
	var minutes float64
	must(t, west.Raw(`SELECT extract(epoch FROM scheduled_at - inserted_at) / 60 FROM outboxer_messages`).Scan(&minutes).Error)
	if minutes < 60 || minutes > 70 {
		t.Errorf("the retry is due %.1f minutes after the add, want about 60", minutes)
	}
	_, err = other.RetryNow(t.Context(), orders, outbox.Filter{MinAttempts: 1})
	must(t, err)
	_, err = other.Drain(t.Context())
	must(t, err)
	if len(relay.got) != 1 || relay.got[0].Attempts != 1 {
		t.Errorf("delivered %v, want the message at its second attempt", relay.got)
	}
}

// A transaction elsewhere that keeps an old snapshot open makes dead rows
// stay; all is delivered in order all the same, and nothing is left when it
// ends. C49
func TestOldSnapshot(t *testing.T) {
	t.Parallel()
	pg := testdb.Postgres(t)
	db := pg.Gorm(t)
	relay := &recorder{}
	instance := install(t, db, outbox.Outbox{Relay: relay, BatchSize: 500})
	old := pg.Conn(t)
	_, err := old.Exec(t.Context(), `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM outboxer_messages`)
	must(t, err)
	const rounds, each = 10, 1000
	for range rounds {
		events := make([]outbox.Event, each)
		for i := range events {
			events[i] = outbox.Message{Type: "t", GroupKey: string(rune('a' + i%7))}
		}
		must(t, db.Transaction(func(tx *gorm.DB) error { return outbox.Add(tx, events...) }))
		_, err := instance.Drain(t.Context())
		must(t, err)
	}
	if len(relay.got) != rounds*each {
		t.Fatalf("delivered %d messages, want %d", len(relay.got), rounds*each)
	}
	for i := 1; i < len(relay.got); i++ {
		if relay.got[i].ID <= relay.got[i-1].ID {
			t.Fatalf("message %d came after %d", relay.got[i].ID, relay.got[i-1].ID)
		}
	}
	_, err = old.Exec(t.Context(), `COMMIT`)
	must(t, err)
	var rows int64
	must(t, db.Raw(`SELECT count(*) FROM outboxer_messages`).Scan(&rows).Error)
	if rows != 0 {
		t.Errorf("%d rows are left, want none", rows)
	}
}
