// Package outbox is a transactional outbox for applications that use GORM.
//
// An application that changes its database and tells others about it writes to
// two places, and a crash between the two loses a message or announces what
// never happened. With an outbox it writes to one: the message is a row, added
// in the transaction of the change, and workers deliver it afterwards, until
// they get through.
//
//	ob, err := outbox.New(outbox.Config{
//		Outboxes: []outbox.Outbox{{Name: "orders", Partitions: 4}},
//		Relays:   map[string]outbox.Relay{"orders": relay},
//	})
//	err = db.Use(ob)               // the GORM plugin
//	err = outbox.AutoMigrate(db)   // safe to call from every node at start
//	err = db.Transaction(func(tx *gorm.DB) error {
//		if err := tx.Create(&order).Error; err != nil {
//			return err
//		}
//		return outbox.Add(tx, OrderPlaced{Order: order})
//	})
//	err = ob.Run(ctx)              // relays until ctx ends
//
// OrderPlaced is an [Event]: it says what [Message] it is, usually with [JSON].
// A [Relay] hands messages to a broker, a webhook or a function; [Each] makes
// one of a function for a single message. A process that only publishes calls
// neither Run nor Start.
//
// # What is promised
//
//   - A message exists exactly when its transaction committed, whichever way
//     GORM runs it. Outside a transaction Add refuses.
//   - Every message is delivered at least once. A duplicate comes only from a
//     batch whose outcome is unknown, as after a crash, and has the same
//     content and the same [Envelope.DedupID].
//   - Messages of a group, those of one GroupKey in one outbox, are delivered
//     in the order of their commits, and in one transaction in the order of the
//     calls.
//   - A message that fails holds its own group and nothing else. It is retried
//     until it goes through, unless Outbox.MaxAttempts or Outbox.GiveUpAfter
//     says that it may be given up: then it is dead, is kept, and can be
//     retried by hand.
//   - While a destination is unavailable nothing is charged to any message, and
//     nothing is written.
//
// # How it is deployed
//
// On PostgreSQL any number of nodes share the work: an outbox has partitions,
// each delivered by one worker at a time, wherever that runs. Nodes are woken by
// NOTIFY, and look for themselves from time to time in case that is lost. On
// SQLite one process delivers, and others may publish.
//
// A delivery on PostgreSQL holds a connection of the pool while the relay works.
// Config.MaxDeliveries bounds how many there are, so that the application
// always has some left.
//
// # Errors
//
// Functions return errors that errors.Is recognises as one of the Err variables
// of this package where a caller would branch on it. Add validates everything
// before it touches the database: an event that is refused leaves the
// transaction usable.
package outbox
