package outbox_test

import (
	"context"
	"errors"
	"fmt"

	"gorm.io/gorm"

	"github.com/gormoutbox/outbox"
)

// A destination refused a message for good. Once it is repaired, what is dead
// is sent after all.
func ExampleInstance_RetryDeadWhere() {
	db, closeDB := tempDB()
	defer closeDB()
	ctx, repaired := context.Background(), false
	ob := use(db, outbox.Config{Outboxes: []outbox.Outbox{{
		Name:        "orders",
		MaxAttempts: 3,
		Relay: outbox.Each(func(_ context.Context, e outbox.Envelope) error {
			if !repaired {
				return outbox.Permanent(errors.New("unknown customer"))
			}
			fmt.Println("delivered", e.Type)
			return nil
		}),
	}}})
	_ = db.Transaction(func(tx *gorm.DB) error {
		return outbox.Add(tx, outbox.Message{Type: "order.placed", GroupKey: "1"})
	})
	_, _ = ob.Drain(ctx)

	page, err := ob.Messages(ctx, outbox.Query{Outbox: "orders", Filter: outbox.Filter{Status: outbox.Dead}})
	if err != nil {
		panic(err)
	}
	for _, m := range page.Messages {
		fmt.Println(m.Type, "is dead:", m.LastError)
	}
	repaired = true
	n, err := ob.RetryDeadWhere(ctx, "orders", outbox.Filter{ErrorContains: "unknown customer"})
	fmt.Println("retried", n, err)
	_, _ = ob.Drain(ctx)
	// Output:
	// order.placed is dead: unknown customer
	// retried 1 <nil>
	// delivered order.placed
}

func ExampleInstance_Stats() {
	db, closeDB := tempDB()
	defer closeDB()
	ctx := context.Background()
	ob := use(db, outbox.Config{Outboxes: []outbox.Outbox{{Name: "orders", Partitions: 2}}})
	_ = db.Transaction(func(tx *gorm.DB) error {
		return outbox.Add(tx, outbox.Message{Type: "order.placed", GroupKey: "1"}, outbox.Message{Type: "order.paid", GroupKey: "1"})
	})
	if err := ob.Pause(ctx, "orders"); err != nil {
		panic(err)
	}
	stats, err := ob.Stats(ctx)
	if err != nil {
		panic(err)
	}
	for _, o := range stats.Outboxes {
		fmt.Printf("%s: %d pending in %d partitions, paused: %v\n", o.Outbox, o.Pending(), o.Partitions, !o.PausedAt.IsZero())
	}
	// Output: orders: 2 pending in 2 partitions, paused: true
}

func ExampleInstance_Repartition() {
	db, closeDB := tempDB()
	defer closeDB()
	ctx := context.Background()
	ob := use(db, outbox.Config{Outboxes: []outbox.Outbox{{Name: "orders"}}})
	if err := ob.Repartition(ctx, "orders", 8); err != nil {
		panic(err)
	}
	stats, err := ob.Stats(ctx)
	if err != nil {
		panic(err)
	}
	fmt.Println(stats.Outboxes[0].Partitions, "partitions, before:", stats.Outboxes[0].Superseded)
	// Output: 8 partitions, before: [1]
}
